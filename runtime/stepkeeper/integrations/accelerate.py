"""Let a loop that is written with Accelerate survive. Needs the extra `stepkeeper[accelerate]`."""

import importlib.metadata
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final

import torch
from accelerate import Accelerator, skip_first_batches
from torch.nn.parallel import DistributedDataParallel

from stepkeeper import CheckpointManager, PerRank, prime_optimizer
from stepkeeper.integrations.late_random import LateRandomState, first_of_ranks

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

    ::

        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        training = Training(accelerator, manager)
        for epoch in training.epochs(3):
            for batch in training.batches(loader):
                with accelerator.accumulate(model):
                    ...
                training.step({"loss": loss.item()})
            evaluate(model)

    Models, optimizers, schedules, the gradient scaler, objects of `register_for_checkpointing`, random numbers and the
    position in the data are saved. A loader that is a StatefulDataLoader continues where it was. Of any other one, the
    batches that were seen are skipped.

    Attributes:
        global_step: Number of optimizer steps that are done.

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
        self._manager = manager
        self._position = _Position(accelerator)
        self._random = LateRandomState()
        self._epoch_random = LateRandomState()
        self._state = {
            **_collect(accelerator),
            "position": PerRank(self._position, resize=first_of_ranks),
            "random": self._random,
            "epoch_random": self._epoch_random,
        }
        restored = manager.restore(self._state)
        self.global_step = restored.step if restored else 0

    def epochs(self, n_epochs: int) -> Iterator[int]:
        """Count from the epoch in which the training was to `n_epochs` - 1."""
        position = self._position
        while position.epoch < n_epochs:
            position.is_read = False
            yield position.epoch
            position.epoch, position.n_seen, position.has_ended = position.epoch + 1, 0, False

    def batches(self, loader: Any) -> Iterator[Any]:
        """Read the epoch's batches that the training hasn't seen. Call it once in each epoch.

        Args:
            loader: A prepared data loader.
        """
        position = self._position
        if position.is_read:
            raise RuntimeError(
                "batches() was called twice in one epoch: it keeps the position of one loader only"
            )
        position.is_read = True
        self._epoch_random.set()
        self._epoch_random.keep()
        position.begin_epoch(loader)
        left = (
            loader
            if position.is_stateful or not position.n_seen
            else skip_first_batches(loader, position.n_seen)
        )
        position.loader = left
        for batch in () if position.has_ended else left:
            self._random.set()
            yield batch
        self._random.set()

    def step(self, metrics: Mapping[str, object] | None = None) -> None:
        """Finish a batch. If the optimizers have stepped, save the step if it is due; after a notice, end the process.

        Call it after each batch, once the optimizer and the schedule have stepped.

        Args:
            metrics: Numbers to store with the commit and to report, by name.

        Raises:
            SystemExit: A notice has stopped the training; this step is saved. The exit code is 75.
            StepkeeperError: `CheckpointManager.step` raises it.
        """
        position = self._position
        position.n_seen += 1
        position.has_ended = bool(getattr(position.loader, "end_of_dataloader", False))
        if not self._accelerator.sync_gradients:
            return
        self.global_step += 1
        if self._manager.step(self.global_step, self._state, metrics).stop:
            self._manager.close()


class _Position:
    """The position in the data, and the counter of the batches whose gradients are added up."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._restored: Mapping[str, Any] = {}
        self._sampler: dict[str, Any] = {}
        self.loader: Any = None
        self.epoch = self.n_seen = 0
        self.has_ended = self.is_read = self._has_begun = False

    @property
    def is_stateful(self) -> bool:
        """True if the epoch's loader keeps its own position."""
        return bool(getattr(self.loader, "use_stateful_dataloader", False))

    def begin_epoch(self, loader: Any) -> None:
        """Give the loader, and its sampler, the state that they had when the epoch began."""
        self.loader = loader
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else loader.sampler
        generator = getattr(sampler, "generator", None)
        restored, self._restored = self._restored, {}
        if "seed" in restored.get("sampler", {}):
            sampler.initial_seed = restored["sampler"]["seed"]
        if "generator" in restored.get("sampler", {}) and generator is not None:
            generator.set_state(restored["sampler"]["generator"])
        if self.is_stateful and (restored or not self._has_begun):
            # Without a state to load it makes a new iterator: the one that Accelerate has made draws no random numbers.
            loader.load_state_dict({} if self.has_ended else restored.get("loader") or {})
        self._has_begun = True
        self._sampler = {}
        if hasattr(sampler, "initial_seed"):
            self._sampler["seed"] = sampler.initial_seed
        if isinstance(generator, torch.Generator):
            self._sampler["generator"] = generator.get_state()

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "n_seen": self.n_seen,
            "has_ended": self.has_ended,
            "accumulated": self._accelerator.step,
            "sampler": self._sampler,
            "loader": self.loader.state_dict() if self.is_stateful else None,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._restored = saved
        self.epoch, self.n_seen, self.has_ended = saved["epoch"], saved["n_seen"], saved["has_ended"]
        self._accelerator.step = saved["accumulated"]


def _collect(accelerator: Accelerator) -> dict[str, object]:
    """Return what the Accelerator has prepared, unwrapped, by the names of Accelerate's own files."""
    if missing := [name for name in _KINDS if not hasattr(accelerator, name)]:
        raise ImportError(
            f"accelerate {importlib.metadata.version('accelerate')} has no Accelerator.{missing[0]}, which a restore "
            "needs: install accelerate 1.15, or a release of stepkeeper that knows this one"
        )
    found = chain.from_iterable(
        (
            (kind if number == 0 else f"{kind}_{number}", each)
            for number, each in enumerate(getattr(accelerator, name))
        )
        for name, kind in _KINDS.items()
    )
    state = {name: _unwrap(each) for name, each in found}
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
