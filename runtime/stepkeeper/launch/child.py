"""Run a command as a container's first process should, and forward this process's signals."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from stepkeeper.contract import LAUNCHER_VARIABLE
from stepkeeper.ending.launcher_folder import list_registered

__all__ = ["Child"]

_STOPS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that request an end. Kubernetes sends SIGTERM, or the one that the image or the container names."""

_FORWARDED: Final = _STOPS | {signal.SIGUSR1, signal.SIGUSR2}
_BY_SIGNAL: Final = 128
_LOOK_S: Final = 0.05
"""torchrun checks its processes every 0.1 s. It must get SIGTERM before it finds an ended one, and restarts all."""

_MARGIN_S: Final = 0.15
"""Seconds before the kubelet's SIGKILL that the launcher needs to exit with the training's code. The training's
processes end themselves 0.3 s before the kill.
"""


class Child:
    """A command with an orderly stop: its ranks get SIGTERM first, and the command once all ranks have ended."""

    def __init__(
        self,
        command: list[str],
        environ: Mapping[str, str],
        folder: Path,
        grace_s: float,
        supervisor: int | None = None,
    ) -> None:
        """Start the command, in the main thread. Raises OSError. Its ranks register in `folder`.

        `grace_s` are the seconds from SIGTERM until its sender kills all processes. `supervisor` is the parent process
        whose end counts as SIGTERM, if any. The command is killed after that, since nothing else would do it.
        """
        self._supervisor = supervisor
        self._folder = folder
        self._time_s = grace_s - _MARGIN_S
        self._came: list[int] = []
        """The numbers of the signals that have come, in order."""

        self._ends_s: float | None = None
        """The end of the command's time after SIGTERM, by time.monotonic(); None before SIGTERM."""

        self._signaled: set[int] = set()
        self._out_of_reach: set[int] = set()
        """Registered processes that can't be sent a signal: they don't delay the command's."""

        for signum in _FORWARDED:
            signal.signal(signum, lambda number, _: self._came.append(number))
        self._process = subprocess.Popen(command, env={**environ, LAUNCHER_VARIABLE: str(folder)})

    @property
    def was_asked_to_stop(self) -> bool:
        """True if a signal that requests an end has come."""
        return not _STOPS.isdisjoint(self._came)

    def wait(self, may_leave: Callable[[], bool]) -> int:
        """Wait for the command's end and return its exit code; 128 plus the signal's number if a signal killed it.

        Shortly before the kill that follows SIGTERM, `may_leave` is called once. If it returns True, the
        command counts as killed: the end of a container's first process ends it.
        """
        n_seen, has_asked = 0, False
        while (code := self._process.poll()) is None:
            if self._is_orphan and signal.SIGTERM not in self._came:
                self._came.append(signal.SIGTERM)
            for signum in self._came[n_seen:]:
                n_seen += 1
                self._forward(signum)
            if self._stop() and not has_asked:
                has_asked = True
                if self._is_orphan:
                    self._process.kill()
                elif may_leave():
                    code = -signal.SIGKILL
                    break
            time.sleep(_LOOK_S)
        for signum in _FORWARDED:
            # The interpreter resets handlers at its exit, and a signal would then replace the exit code.
            signal.signal(signum, signal.SIG_IGN)
        return code if code >= 0 else _BY_SIGNAL - code

    @property
    def _is_orphan(self) -> bool:
        """True if this process has a supervisor that has ended."""
        return self._supervisor not in {None, os.getppid()}

    def _forward(self, signum: int) -> None:
        """Forward a signal to the command; `_stop` handles SIGTERM."""
        if signum != signal.SIGTERM:
            self._process.send_signal(signum)
        elif self._ends_s is None:
            self._ends_s = time.monotonic() + self._time_s

    def _stop(self) -> bool:
        """After SIGTERM, send it to the ranks, and when they have ended, or the time is over, to the command.

        Return True if the time is over.
        """
        if self._ends_s is None:
            return False
        is_over = time.monotonic() >= self._ends_s
        due = set(list_registered(self._folder) - self._out_of_reach)
        if is_over or not due:
            due.add(self._process.pid)
        for pid in due - self._signaled:
            try:
                os.kill(pid, signal.SIGTERM)
            except OSError:
                self._out_of_reach.add(pid)
        self._signaled |= due
        return is_over
