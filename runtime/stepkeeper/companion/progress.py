"""What this process says of itself, handed to the companion now and then: the train thread only leaves notes."""

import numbers
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from stepkeeper.companion.reporter import TrainerState
from stepkeeper.contract import ReportedRestore, ReportPhase
from stepkeeper.contract.report import MAX_METRICS
from stepkeeper.loggers import logger

__all__ = ["Progress", "numbers_in"]

_log: Final = logger(__name__)
_ERROR_LIMIT: Final = 2000
_UNREAD: Final = "?"
_NAME_LIMIT: Final = 128


class Progress:
    """The trainer's state. `finished` costs the train thread about a microsecond; news are told at once."""

    def __init__(self, tell: Callable[[TrainerState], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._state = TrainerState()
        self._latest: tuple[int, int | None, Mapping[str, object] | None] | None = None
        self._told: object = None
        self._finished_s: float | None = None
        self._complained: set[str] = set()

    @property
    def step(self) -> int | None:
        """Last finished step."""
        return None if self._latest is None else self._latest[0]

    def finished(self, step: int, metrics: Mapping[str, object] | None) -> None:
        """`step` is done. What `metrics` holds is turned into text later, in another thread.

        A number, a string or a CPU tensor of one element is. Anything else is told as "?": to read a tensor on a device
        can wait for a compilation, and in another thread than the training's it fails or disturbs that.
        """
        now_s = time.monotonic()
        millis = None if self._finished_s is None else int((now_s - self._finished_s) * 1000)
        self._finished_s = now_s
        self._latest = (step, millis, metrics)

    def moved(self, phase: ReportPhase) -> None:
        """The process has come to `phase`."""
        self._change(lambda state: replace(state, phase=phase))

    def restored(self, restored: ReportedRestore | None) -> None:
        """Training begins, from `restored` or from scratch."""
        self._change(lambda state: replace(state, restored=restored, phase=ReportPhase.TRAINING))

    def noticed(self, source: str) -> None:
        """There is a notice."""
        self._change(lambda state: replace(state, notice=source))

    def saving(self, step: int | None) -> None:
        """The save of `step` is in flight; None: no save is."""
        self._change(lambda state: replace(state, in_flight_step=step))

    def failed(self, error: str | None) -> None:
        """The newest thing that went wrong, None once it is right again."""
        text = None if error is None else error[-_ERROR_LIMIT:]
        self._change(lambda state: replace(state, error=text))

    def flush(self) -> None:
        """The companion knows of the last finished step."""
        if self._latest is not self._told:
            self._change(lambda state: state)

    def _change(self, change: Callable[[TrainerState], TrainerState]) -> None:
        with self._lock:
            state = change(self._state)
            latest = self._latest
            if latest is not None:
                step, millis, metrics = latest
                state = replace(state, step=step, step_millis=millis, metrics=self._texts(metrics))
            self._state = state
            self._told = latest
            self._tell(state)

    def _texts(self, metrics: Mapping[str, object] | None) -> dict[str, str]:
        return {
            str(name): self._text(str(name), value)
            for name, value in list((metrics or {}).items())[:MAX_METRICS]
        }

    def _text(self, name: str, value: object) -> str:
        try:
            if isinstance(value, str | numbers.Number):
                return str(value)
            if isinstance(value, torch.Tensor) and _is_plain(value):
                return str(value.item())
            why = "pass a number, as loss.item() is one where the loop reads the loss anyway"
        except Exception as error:  # of the value's own code: it must not end the thread that tells the rest
            why = f"it can't be turned into text: {error!r}"
        if name not in self._complained:
            self._complained.add(name)
            _log.warning('the metric %r, a %s, is reported as "?": %s', name, type(value).__name__, why)
        return _UNREAD


def numbers_in(metrics: Mapping[str, object] | None) -> dict[str, str]:
    """The metrics that are numbers, as a commit holds them: exactly. Tensors on devices are left alone."""
    found = {}
    for name, value in list((metrics or {}).items())[:MAX_METRICS]:
        number = value.item() if isinstance(value, torch.Tensor) and _is_plain(value) else value
        if isinstance(number, numbers.Real) and len(str(name)) <= _NAME_LIMIT:
            with suppress(OverflowError):  # a whole number beyond all floats says nothing to go by
                found[str(name)] = repr(float(number))
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Subclasses may ask other ranks for their value."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.numel() == 1
    )
