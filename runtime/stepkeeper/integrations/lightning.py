"""Let a training of Lightning's Trainer survive. Needs the extra `stepkeeper[lightning]`."""

import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from stepkeeper import CheckpointManager, PerRank, prime_optimizer
from stepkeeper.integrations.resuming import (
    SavedTraining,
    check_attributes,
    first_of_ranks,
    name_objects,
)

__all__ = ["Checkpoints"]

_NOT_RESUMABLE: Final = "You're resuming from a checkpoint that ended before the epoch ended"
"""The beginning of a warning that is wrong here: `_Position.skip` leaves out what was seen."""


class Checkpoints(Callback):
    """Restore the latest commit when a fit begins, continue at its batch, and save when it is due.

    Model, optimizers, schedules, the gradient scaler, random numbers, loops, the states of callbacks and data module,
    and the position in the data are saved. Loaders that are all StatefulDataLoaders continue where they were. Otherwise
    the epoch's seen batches are read again and dropped. After a notice the process ends within `fit`, with exit
    code 75.

    Ranks:
        All ranks have one.
    """

    def __init__(self, manager: CheckpointManager) -> None:
        """Save by `manager`. Nothing else calls its `restore`, `step` or `save`."""
        self._state = SavedTraining(manager)
        self._position: _Position | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.strategy.lightning_restore_optimizer:
            name = type(trainer.strategy).__name__
            raise ValueError(f"{name} alone can save its optimizers: use DDP, FSDP or ModelParallel")
        loop = _find_epoch_loop(trainer)
        self._position = position = _Position(trainer)
        parts = {
            "model": pl_module,
            **name_objects("optimizer", map(prime_optimizer, trainer.optimizers)),
            **name_objects("schedule", [each.scheduler for each in trainer.lr_scheduler_configs]),
            "trainer": PerRank(position, resize=first_of_ranks),
        }
        if self._state.restore(parts):
            warnings.filterwarnings("ignore", _NOT_RESUMABLE)
        else:
            self._state.epoch_random.keep()
        # Lightning has no hook between a step's end, with its validation and logs, and the read of the next batch.
        loop.advance = self._before_each(loop.advance)

    def _before_each(self, advance: Callable[[Any], None]) -> Callable[[Any], None]:
        def wrapped(fetcher: Any) -> None:
            assert self._position is not None
            if self._position.is_restored:
                self._state.begin_epoch()
                if self._position.had_ended:
                    self._state.random.set()
                self._position.skip(fetcher)
                self._state.random.set()
            self._position.loaders = fetcher.combined_loader.flattened
            trainer = self._position.trainer
            self._state.finish_step(trainer.global_step, trainer.callback_metrics)
            advance(fetcher)

        return wrapped

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # In place of Lightning's handler, which ends the loop after a batch: the manager gets the notice anyway.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _ignore)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The first epoch's iterator was made before.
        if trainer.current_epoch > 0:
            self._state.epoch_random.keep()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _find_epoch_loop(trainer).batch_progress.is_last_batch:
            # A longer training would begin its next epoch with these.
            self._state.epoch_random.keep()
        self._state.finish_step(trainer.global_step, trainer.callback_metrics)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Where nothing was left to train.
        self._state.random.set()
        del _find_epoch_loop(trainer).advance


class _Position:
    """The trainer's loops, and the small states that it has."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.loaders: Sequence[Any] = ()
        """The loaders that the epoch reads."""

        self._saved_loaders: Sequence[Any] = ()
        self.is_restored = False
        self.had_ended = False
        """True if the commit was made after the last batch of an epoch, and no further epoch had begun."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of loops, loaders, callbacks, precision and data module. The tensors are on the CPU."""
        trainer = self.trainer
        loops = trainer.fit_loop.state_dict()
        # `loaders` below has them.
        loops["state_dict"] = {
            name: each for name, each in loops["state_dict"].items() if name != "combined_loader"
        }
        state: dict[str, Any] = {
            "loops": loops,
            "loaders": [loader.state_dict() for loader in self.loaders if isinstance(loader, Stateful)],
            "callbacks": {each.state_key: own for each in trainer.callbacks if (own := each.state_dict())},
            "metrics": dict(trainer.callback_metrics),
            "precision": trainer.precision_plugin.state_dict(),
            "data": trainer.datamodule.state_dict() if trainer.datamodule else {},
        }
        on_cpu: dict[str, Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state)
        return on_cpu

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        trainer = self.trainer
        trainer.fit_loop.load_state_dict(saved["loops"])
        # No sanity check, also where the training was at its end.
        loop = _find_epoch_loop(trainer)
        loop.val_loop.restarting = True
        self.had_ended = loop.batch_progress.is_last_batch
        for callback in trainer.callbacks:
            if callback.state_key in saved["callbacks"]:
                callback.load_state_dict(saved["callbacks"][callback.state_key])
        # A schedule or callback may ask for those of the last validation.
        trainer.callback_metrics.update(saved["metrics"])
        if saved["precision"]:
            trainer.precision_plugin.load_state_dict(saved["precision"])
        if trainer.datamodule and saved["data"]:
            trainer.datamodule.load_state_dict(saved["data"])
        self._saved_loaders = saved["loaders"]
        self.is_restored = True

    def skip(self, fetcher: Any) -> None:
        """Make the loaders continue where they were at the save."""
        self.is_restored = False
        loop = _find_epoch_loop(self.trainer)
        loaders, n_seen = fetcher.combined_loader.flattened, loop.batch_progress.current.ready
        # Of loaders without a length, Lightning has read one batch more than it has trained.
        are_resumed = fetcher.length is not None and all(isinstance(each, Stateful) for each in loaders)
        if are_resumed:
            for loader, saved in zip(loaders, self._saved_loaders, strict=True):
                loader.load_state_dict(saved)
        # Again, now that samplers have been given their epoch and the random numbers are the epoch's.
        iter(fetcher)
        if are_resumed:
            fetcher.fetched = n_seen
        else:
            for _ in range(n_seen):
                next(fetcher)
        # All that followed the saved step, such as its validation, was done before the save. The loop over epochs has a
        # setter that can't unset this where max_steps is given.
        loop.restarting = self.trainer.fit_loop._restarting = False


def _find_epoch_loop(trainer: Trainer) -> Any:
    """Return the loop over batches. Its `advance` trains one. It is public by its name only."""
    check_attributes("lightning", trainer.fit_loop, "epoch_loop", "_restarting")
    check_attributes("lightning", trainer.fit_loop.epoch_loop, "advance", "val_loop", "batch_progress")
    return trainer.fit_loop.epoch_loop


def _ignore(*_: object) -> None:
    """Do nothing at a SIGTERM."""
