"""Collect this process's state for reports. Another thread than the training's formats and sends it."""

import numbers
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from stepkeeper.companion.reporter import TrainerState, utf8_text
from stepkeeper.contract import CommitPoint, ReportPhase
from stepkeeper.contract.report import MAX_METRICS
from stepkeeper.loggers import logger

__all__ = ["Progress", "select_stored_metrics"]

_log: Final = logger(__name__)
_ERROR_LIMIT: Final = 2000
_UNREAD: Final = "?"
_NAME_LIMIT: Final = 128
_TEXT_LIMIT: Final = 256
"""Characters of a metric in reports. With errors and stacks they stay far below the operator's limit."""


class Progress:
    """Collect the trainer's state, and pass it to `send`, in the thread that changed it.

    `record_step` costs the train thread about a microsecond. Changes of anything else are sent at once.
    """

    def __init__(self, send: Callable[[TrainerState], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._state = TrainerState()
        self._latest: tuple[int, int | None, Mapping[str, object] | None] | None = None
        """The last finished step, the milliseconds that it took, and its metrics."""

        self._sent: object = None
        """The `_latest` that was sent last."""

        self._last_step_s: float | None = None
        self._complained: set[str] = set()
        """Names of metrics that a warning has named: one warning each is enough."""

    @property
    def step(self) -> int | None:
        """The last finished step."""
        return None if self._latest is None else self._latest[0]

    def record_step(self, step: int, metrics: Mapping[str, object] | None) -> None:
        """Record that `step` is finished. Another thread turns `metrics` into texts later.

        A tensor on a device becomes "?": reading it can wait for a compilation, and outside the train thread
        it fails or disturbs training.
        """
        now_s = time.monotonic()
        millis = None if self._last_step_s is None else int((now_s - self._last_step_s) * 1000)
        self._last_step_s = now_s
        self._latest = (step, millis, metrics)

    def set_phase(self, phase: ReportPhase) -> None:
        """Record that the process has reached `phase`."""
        self._change(lambda state: replace(state, phase=phase))

    def record_restore(self, restored: CommitPoint | None) -> None:
        """Record that training begins, from the commit `restored` or from scratch."""
        self._change(lambda state: replace(state, restored=restored, phase=ReportPhase.TRAINING))

    def record_notice(self, source: str) -> None:
        """Record a notice from `source`."""
        self._change(lambda state: replace(state, notice=source))

    def set_in_flight(self, step: int | None) -> None:
        """Record that the save of `step` is in flight; None: no save is."""
        self._change(lambda state: replace(state, in_flight_step=step))

    def set_error(self, error: str | None) -> None:
        """Record the newest error; None once it is resolved."""
        text = None if error is None else utf8_text(error[-_ERROR_LIMIT:])
        self._change(lambda state: replace(state, error=text))

    def send_latest_step(self) -> None:
        """Send the last finished step to the companion, unless it has been sent already."""
        if self._latest is not self._sent:
            self._change(lambda state: state)

    def _change(self, change: Callable[[TrainerState], TrainerState]) -> None:
        with self._lock:
            state = change(self._state)
            latest = self._latest
            if latest is not None:
                step, millis, metrics = latest
                state = replace(state, step=step, step_millis=millis, metrics=self._texts(metrics))
                if state.phase is ReportPhase.STARTING:
                    # A training that restores nothing, or by other code, doesn't report its start otherwise.
                    state = replace(state, phase=ReportPhase.TRAINING)
            self._state = state
            self._sent = latest
            self._send(state)

    def _texts(self, metrics: Mapping[str, object] | None) -> dict[str, str]:
        return {
            utf8_text(str(name)[:_NAME_LIMIT]): utf8_text(self._text(str(name), value)[:_TEXT_LIMIT])
            for name, value in list((metrics or {}).items())[:MAX_METRICS]
        }

    def _text(self, name: str, value: object) -> str:
        try:
            if isinstance(value, str | numbers.Number):
                return str(value)
            if isinstance(value, torch.Tensor) and _is_plain(value):
                return str(value.item())
            why = "pass a number, such as loss.item() where the loop reads the loss anyway"
        except Exception as error:  # from the value's own code; it must not end the reporting thread
            why = f"it can't be turned into text: {error!r}"
        if name not in self._complained:
            self._complained.add(name)
            _log.warning(
                'the metric %r, an object of type %s, is reported as "?": %s', name, type(value).__name__, why
            )
        return _UNREAD


def select_stored_metrics(metrics: Mapping[str, object] | None) -> dict[str, str]:
    """Return the metrics to store with a commit: numbers, or texts of one, each as text for float().

    Tensors on devices are left out.
    """
    found = {}
    for name, value in list((metrics or {}).items())[:MAX_METRICS]:
        number = value.item() if isinstance(value, torch.Tensor) and _is_plain(value) else value
        if isinstance(number, numbers.Real | str) and len(str(name)) <= _NAME_LIMIT:
            # Left out: a text that is no number, or an integer beyond the range of floats.
            with suppress(OverflowError, ValueError):
                found[str(name)] = repr(float(number))
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether reading the tensor is cheap. A subclass may communicate with other ranks for it."""
    is_basic = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_basic and tensor.device.type == "cpu" and tensor.numel() == 1
