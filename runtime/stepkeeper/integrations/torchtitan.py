"""Save and restore torchtitan's trainings. Needs the extra `stepkeeper[torchtitan]`."""

import sys
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager as TitanCheckpointManager
from torchtitan.components.checkpointer.base import BaseCheckpointManager, ModelWrapper
from torchtitan.tools import filesystem
from typing_extensions import override

from stepkeeper import CheckpointManager, PerRank
from stepkeeper.errors import NotInPodError
from stepkeeper.integrations.resuming import LateRandomState, first_of_ranks

__all__ = ["Checkpoints"]


class Checkpoints(BaseCheckpointManager):
    """A checkpoint manager that torchtitan's trainer uses where its config has `checkpoint=Checkpoints.Config(…)`.

    In a job's container, the job defines the root, when to save and what to keep. Elsewhere `folder`, `interval` and
    `keep_latest_k` of the config do. After a notice the trainer's process ends with exit code 75. The last step is
    saved whole, as all others.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Has torchtitan's settings of any checkpoint manager."""

        # Without arguments, since a class with slots is made twice.
        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.last_save_in_hf:
                raise ValueError(
                    "last_save_in_hf: save as usual, and write safetensors by `stepkeeper export`"
                )

    save_future: Future[None] | None = None
    """None: the trainer never waits for a save."""

    def __init__(
        self, config: Config, *, states: dict[str, Any], base_folder: str = "", **parts: Any
    ) -> None:
        """Open the root. The trainer's config calls this with the parts of the training."""
        self.enable = config.enable
        if not self.enable:
            return
        self._config = config
        self._parts = {"states": dict(states), **parts}
        self._random = LateRandomState()
        self._state = {
            # Each rank counts its own tokens, and reads its own data.
            **{name: PerRank(part, resize=first_of_ranks) for name, part in states.items()},
            "dataloader": PerRank(parts["dataloader"]),
            "model": ModelWrapper(parts["model_parts"]),
            "optimizer": _ByOwnNames(parts["optimizers"]),
            "lr_scheduler": parts["lr_schedulers"],
            "random": self._random,
        }
        try:
            self._manager = CheckpointManager.from_env()
        except NotInPodError:
            self._manager = CheckpointManager(
                filesystem.join(base_folder, config.folder),
                save=config.interval,
                keep=config.keep_latest_k or None,
            )

    @override
    def _load(self, step: int = -1) -> bool:
        """Restore the latest commit, or that of `step`. Where there is none, load from `initial_load_path`, if any."""
        chosen = None if step == -1 else step
        restored = self._manager.restore(self._state, chosen, exclude=self._config.exclude_from_loading)
        if restored is None:
            return self._load_initial()
        # A StatefulDataLoader makes its iterator now, and draws random numbers for it, as it had before the save.
        if (loader := self._parts["dataloader"]) is not None:
            loader.state_dict()
        self._random.set()
        return True

    def _load_initial(self) -> bool:
        path = self._config.initial_load_path
        if not path:
            return False
        fields = ("initial_load_model_only", "initial_load_in_hf", "initial_load_in_hf_quantized")
        given = {name: getattr(self._config, name) for name in fields}
        # A folder without steps, so that it takes the initial path.
        config = TitanCheckpointManager.Config(
            enable=True, folder="none", load_only=True, keep_latest_k=0, initial_load_path=path, **given
        )
        return bool(TitanCheckpointManager(config, **self._parts, base_folder=path).load())

    @override
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Finish a step, and save it if it is due. After a notice, end the process. The end saves the last one."""
        if self._config.load_only:
            return False
        outcome = self._manager.step(curr_step, self._state)
        if outcome.stop:
            self._manager.close()
        if outcome.in_flight is None and curr_step == 1 and self._config.enable_first_step_checkpoint:
            self._manager.save(curr_step, self._state)
            return True
        return outcome.in_flight is not None

    @override
    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a save has its own copy when it returns."""

    @override
    def _wait_for_saving(self) -> None:
        """Do nothing: `save_future` is None."""

    @override
    def _close(self) -> None:
        # The trainer closes this after an error too, while that is handled: then the training isn't done.
        self._manager.__exit__(*sys.exc_info())


class _ByOwnNames:
    """Optimizers with torchtitan's names. Their container is itself an Optimizer, but has no state of its own."""

    def __init__(self, optimizers: Any) -> None:
        self.state_dict = optimizers.state_dict
        self.load_state_dict = optimizers.load_state_dict
