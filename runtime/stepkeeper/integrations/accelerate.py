"""Let a loop that is written with Accelerate survive. Needs the extra `stepkeeper[accelerate]`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from accelerate import Accelerator, skip_first_batches
from torch.nn.parallel import DistributedDataParallel

from stepkeeper import CheckpointManager, PerRank, prime_optimizer
from stepkeeper.integrations.resuming import (
    SavedTraining,
    check_attributes,
    first_of_ranks,
    name_objects,
)

__all__ = ["Training"]

_KINDS: Final = {
    "_models": "model",
    "_optimizers": "optimizer",
    "_schedulers": "schedule",
    "_custom_objects": "object",
}
"""What an Accelerator has prepared, or was given to save. It lists them in these attributes, which aren't public: as
they are in accelerate 1.15."""


class Training:
    """Restore what an Accelerator has prepared, continue at the batch where the commit's training was, and save.

    Models, optimizers, schedules, the gradient scaler, objects of `register_for_checkpointing`, random numbers and the
    position in the data are saved. A loader that is a StatefulDataLoader continues where it was. Of any other one, the
    batches that were seen are skipped.

    Ranks:
        All ranks construct it and call its methods.
    """

    def __init__(self, accelerator: Accelerator, manager: CheckpointManager) -> None:
        """Restore the latest commit, if there is one, into all that `accelerator` has prepared until now.

        Args:
            accelerator: The Accelerator, after its `prepare`.
            manager: The manager of the root. Nothing else calls its `restore`, `step` or `save`.

        Raises:
            ImportError: The installed accelerate lacks something that this needs.
            StepkeeperError: `CheckpointManager.restore` raises it.
            ValueError: Nothing was prepared.
        """
        self._accelerator = accelerator
        self._position = _Position(accelerator)
        self._state = SavedTraining(manager)
        position = PerRank(self._position, resize=first_of_ranks)
        self._state.restore({**_collect(accelerator), "position": position})

    @property
    def global_step(self) -> int:
        """Number of optimizer steps that are done."""
        return self._state.step

    def epochs(self, n_epochs: int) -> Iterator[int]:
        """Count from the epoch in which the training was to `n_epochs` - 1."""
        position = self._position
        while position.epoch < n_epochs:
            position.is_read = False
            yield position.epoch
            position.end_epoch()
            self._state.epoch_random.keep()
        # Where nothing was left to train.
        self._state.random.set()

    def batches(self, loader: Any) -> Iterator[Any]:
        """Read the epoch's batches that the training hasn't seen. Call it once in each epoch.

        Args:
            loader: A prepared data loader.
        """
        position = self._position
        if position.is_read:
            raise RuntimeError("batches() was called twice in one epoch: it keeps the position of one loader")
        state = self._state
        state.begin_epoch()
        if not position.n_seen:
            state.random.set()
        for batch in position.begin_epoch(loader):
            state.random.set()
            yield batch
        state.random.set()

    def step(self, metrics: Mapping[str, object] | None = None) -> None:
        """Finish a batch. If the optimizers have stepped, save the step if it is due; after a notice, end the process.

        Call it after each batch, once the optimizer and the schedule have stepped.

        Args:
            metrics: Numbers to store with the commit and to report, by name.

        Raises:
            SystemExit: A notice has stopped the training; this step is saved. The exit code is 75.
            StepkeeperError: `CheckpointManager.step` raises it.
        """
        self._position.end_batch()
        if self._accelerator.sync_gradients:
            self._state.finish_step(self.global_step + 1, metrics)


class _Position:
    """The position in the data, and the counter of the batches whose gradients are added up."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._restored: Mapping[str, Any] | None = None
        self._loader: Any = None
        self._sampler: Any = None
        self._sampler_state: dict[str, Any] = {}
        self.epoch = self.n_seen = 0
        self.has_ended = self.is_read = False

    def begin_epoch(self, loader: Any) -> Iterable[Any]:
        """Give the loader and its sampler the state that they had, and return the loader of what is left."""
        is_first, restored = self._loader is None, self._restored or {"sampler": {}, "loader": {}}
        self._loader, self._restored, self.is_read = loader, None, True
        self._sampler = _find_sampler(loader)
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        if "seed" in restored["sampler"]:
            self._sampler.initial_seed = restored["sampler"]["seed"]
        if "generator" in restored["sampler"]:
            self._sampler.generator.set_state(restored["sampler"]["generator"])
        self._note_sampler()
        if self._is_stateful and is_first:
            # Without a state to load it makes a new iterator: the one that Accelerate has made draws no random numbers.
            loader.load_state_dict(restored["loader"] if self.n_seen and not self.has_ended else {})
        elif self.n_seen:
            self._loader = skip_first_batches(loader, self.n_seen)
        return () if self.has_ended else self._loader

    def end_batch(self) -> None:
        """Count a batch."""
        self.n_seen += 1
        self.has_ended = bool(getattr(self._loader, "end_of_dataloader", False))
        if self.has_ended:
            # A resume reads nothing more of this epoch.
            self._note_sampler()

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.n_seen, self.has_ended = self.epoch + 1, 0, False
        self._note_sampler()

    @property
    def _is_stateful(self) -> bool:
        return bool(getattr(self._loader, "use_stateful_dataloader", False))

    def _note_sampler(self) -> None:
        generator = getattr(self._sampler, "generator", None)
        if hasattr(self._sampler, "initial_seed"):
            # Its generator is seeded for each epoch.
            self._sampler_state = {"seed": self._sampler.initial_seed}
        elif isinstance(generator, torch.Generator):
            self._sampler_state = {"generator": generator.get_state()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "n_seen": self.n_seen,
            "has_ended": self.has_ended,
            "accumulated": self._accelerator.step,
            "sampler": self._sampler_state,
            "loader": self._loader.state_dict() if self._is_stateful else None,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._restored = saved
        self.epoch, self.n_seen, self.has_ended = saved["epoch"], saved["n_seen"], saved["has_ended"]
        self._accelerator.step = saved["accumulated"]


def _find_sampler(loader: Any) -> Any:
    """Return the sampler of items, which may be in several of batches, such as those that divide them among ranks."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while (inner := getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))) is not None:
        sampler = inner
    return sampler


def _collect(accelerator: Accelerator) -> dict[str, object]:
    """Return what the Accelerator has prepared, unwrapped, by the names of Accelerate's own files."""
    check_attributes("accelerate", accelerator, *_KINDS)
    state: dict[str, object] = {}
    for attribute, kind in _KINDS.items():
        state |= name_objects(kind, map(_unwrap, getattr(accelerator, attribute)))
    if not state:
        raise ValueError(
            "the Accelerator has prepared nothing yet: call accelerator.prepare(model, …) before"
        )
    for each in state.values():
        if isinstance(each, torch.optim.Optimizer):
            prime_optimizer(each)
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


def _unwrap(prepared: Any) -> Any:
    while isinstance(prepared, DistributedDataParallel) or hasattr(prepared, "_orig_mod"):
        prepared = prepared.module if isinstance(prepared, DistributedDataParallel) else prepared._orig_mod
    # Accelerate's optimizer is one only by its class, and has the real one.
    return (
        getattr(prepared, "optimizer", prepared) if isinstance(prepared, torch.optim.Optimizer) else prepared
    )
