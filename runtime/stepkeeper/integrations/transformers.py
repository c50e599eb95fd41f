"""Run a training of transformers' Trainer that survives. Needs the extra `stepkeeper[transformers]`."""

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.integrations import KubeflowCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput
from typing_extensions import override

from stepkeeper import CheckpointManager, PerRank, RestoreError, prime_optimizer
from stepkeeper.integrations.resuming import SavedTraining, check_attributes, first_of_ranks

__all__ = ["train"]

_POSITION: Final = "trainer"
"""The entry of the state that has the trainer's position, which is read before the trainer builds the rest."""

_COUNTERS: Final = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")
_LOADER: Final = "_load_from_checkpoint"
"""What is needed of the Trainer and isn't public: as it is in transformers 5.24."""

_POST: Final = "_update_status"
"""The method of its KubeflowCallback that waits for an answer. Without it training isn't refused."""


def train(trainer: Trainer, manager: CheckpointManager, **arguments: Any) -> TrainOutput:
    """Train as `trainer.train(**arguments)` does, from the root's latest commit on, and save when it is due.

    Call it in place of `trainer.train()`, in the manager's block. Model, optimizer, schedule, gradient scaler, random
    numbers and the trainer's counters are saved; of a PEFT model the adapters only. Batches that the commit's
    training has seen are skipped. Set `save_strategy="no"`: the Trainer's own checkpoints are not needed.

    Args:
        trainer: A Trainer, or an instance of a subclass.
        manager: The manager of the root. Nothing else calls its `restore`, `step` or `save`.
        arguments: Passed to `trainer.train`. `resume_from_checkpoint` counts only where nothing is committed yet.

    Returns:
        The result of `trainer.train`.

    Raises:
        ImportError: The installed transformers lacks something that this needs.
        RestoreError: The latest commit is damaged. It was quarantined: the next start resumes from the one before.
        SystemExit: A notice has stopped the training; the last step is saved. The exit code is 75.
        ValueError: The trainer uses DeepSpeed, whose state only DeepSpeed can save.

    Ranks:
        All ranks call this.
    """
    if trainer.is_deepspeed_enabled:
        raise ValueError("only DeepSpeed can save its state: train with DDP or FSDP")
    check_attributes("transformers", trainer, _LOADER, "get_batch_samples", "current_flos")
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, KubeflowCallback) and hasattr(callback, _POST):
            _post_aside(callback)
    position = PerRank(None, resize=first_of_ranks)
    restored = manager.restore({_POSITION: position}, items=[_POSITION])
    checkpoints = _Checkpoints(trainer, manager, None if restored is None else restored.step)
    with TemporaryDirectory() as folder, _hooked(trainer, checkpoints, resumes=restored is not None):
        if restored is not None:
            saved: Any = position.value
            Path(folder, TRAINER_STATE_NAME).write_text(saved["state"], encoding="utf-8")
            arguments["resume_from_checkpoint"] = folder
        return trainer.train(**arguments)


@contextmanager
def _hooked(trainer: Trainer, checkpoints: "_Checkpoints", *, resumes: bool) -> Iterator[None]:
    """Let the trainer call `checkpoints`, and load nothing from the folder that has its position."""
    trainer.add_callback(checkpoints)
    hooks = {"get_batch_samples": checkpoints.get_batch_samples}
    if resumes:
        hooks[_LOADER] = _load_nothing
    before = {name: vars(trainer)[name] for name in hooks if name in vars(trainer)}
    vars(trainer).update(hooks)
    try:
        yield
    finally:
        for name in hooks:
            del vars(trainer)[name]
        vars(trainer).update(before)
        trainer.remove_callback(checkpoints)


def _post_aside(callback: KubeflowCallback) -> None:
    """Let its posts wait in threads, since training waits for no operator. None is made while one is under way."""
    post, last = getattr(type(callback), _POST), threading.Thread()

    def start(**arguments: Any) -> None:
        nonlocal last
        if not last.is_alive():
            last = threading.Thread(target=post, args=(callback,), kwargs=arguments, daemon=True)
            last.start()

    setattr(callback, _POST, start)


def _load_nothing(*_: object, **__: object) -> None:
    """Stand in for the load of the model, which a restore fills once it is wrapped."""


class _Checkpoints(TrainerCallback):
    """Restore when the trainer has built everything; finish each step before the trainer begins the next one.

    A step is finished after its log and its evaluation, so that these are in the commit, and before the data of the
    next step is read.
    """

    def __init__(self, trainer: Trainer, manager: CheckpointManager, restored_step: int | None) -> None:
        self._trainer = trainer
        self._restored_step = restored_step
        self._get_batch_samples = trainer.get_batch_samples
        self._state = SavedTraining(manager)

    @override
    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        check_attributes("transformers", trainer, *_COUNTERS)
        state: dict[str, object] = {
            "model": _select_trained(trainer.model),
            "optimizer": prime_optimizer(getattr(trainer.optimizer, "optimizer", trainer.optimizer)),
            "schedule": trainer.lr_scheduler,
            _POSITION: PerRank(_Position(trainer), resize=first_of_ranks),
        }
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            state["scaler"] = scaler
        restored = self._state.restore(state)
        if (step := None if restored is None else restored.step) != self._restored_step:
            raise RestoreError(
                f"the commit of step {self._restored_step}, from which the trainer was to resume, is damaged and "
                f"was quarantined: start again, to resume from step {step}"
            )

    @override
    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._state.begin_epoch()
        if self._is_between_epochs:
            self._state.random.set()
        self._finish_step()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Finish the step before, then read the batches of the next one."""
        self._finish_step()
        batches = self._get_batch_samples(*args, **kwargs)
        self._state.random.set()
        return batches

    @override
    def on_log(self, *_: Any, logs: Mapping[str, float] | None = None, **__: Any) -> None:
        # The summary of the training, which comes before the best model replaces the last one.
        if logs and "train_runtime" in logs:
            if self._is_between_epochs:
                # A longer training would begin its next epoch with these.
                self._state.epoch_random.keep()
            self._finish_step()

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        # Where nothing was left to train.
        self._state.random.set()
        self._finish_step()

    @property
    def _is_between_epochs(self) -> bool:
        return float(self._trainer.state.epoch).is_integer()

    def _finish_step(self) -> None:
        state = self._trainer.state
        recent = takewhile(lambda logs: logs["step"] == state.global_step, reversed(state.log_history))
        metrics = {
            name: value for logs in recent for name, value in logs.items() if name not in ("step", "epoch")
        }
        self._state.finish_step(state.global_step, metrics)


class _Position:
    """The trainer's position and counters, as JSON that the trainer itself reads, and what it keeps besides."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        callbacks = [
            each
            for each in [*trainer.callback_handler.callbacks, trainer.control]
            if isinstance(each, ExportableState)
        ]
        # As the trainer's own save does: callbacks change after the state has been made.
        exported = TrainerState(stateful_callbacks=callbacks).stateful_callbacks
        state = dataclasses.asdict(trainer.state) | {"stateful_callbacks": exported}
        return {
            "state": json.dumps(state),
            "loss": trainer._tr_loss.item(),
            "logged": trainer._globalstep_last_logged,
            "flos": trainer.current_flos,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Set what the trainer doesn't read from its folder."""
        trainer = self._trainer
        trainer._tr_loss.fill_(saved["loss"])
        # The summary's loss is that of this start's steps, as after any resume.
        trainer._total_loss_scalar = -saved["loss"]
        trainer._globalstep_last_logged = saved["logged"]
        trainer.current_flos = saved["flos"]


class _Adapters:
    """The parts of a PEFT model that are trained, or that belong to its adapters."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        model = self._model
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        prefix = model.base_model.prefix
        return {
            name: value for name, value in model.state_dict().items() if name in trained or prefix in name
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._model.load_state_dict(state, strict=False)


def _select_trained(model: Any) -> object:
    try:
        from peft import PeftModel
    except ImportError:
        return model
    return _Adapters(model) if isinstance(model, PeftModel) else model
