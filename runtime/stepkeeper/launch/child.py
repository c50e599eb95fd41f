"""Run a command as the first process of a container does: hand signals on, and bury whom others leave behind."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

__all__ = ["CommandEnd", "CommandError", "run"]

_FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_STOPS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that ask for an end; Kubernetes sends SIGTERM, or the one that the image or the container names."""

_BY_SIGNAL: Final = 128
_PR_SET_CHILD_SUBREAPER: Final = 36
_LOOK_S: Final = 0.05
_MARGIN_S: Final = 0.15
"""Seconds before the kubelet's SIGKILL in which the launcher still has to end with the training's code. The training's
processes end themselves 0.3 s before it.
"""


class CommandError(Exception):
    """A command that can't be started. `code` is what shells end with then."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code: Final = code


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """The end of a command."""

    code: int
    """Its exit code; 128 and the signal's number if a signal ended it."""

    was_told: bool
    """True if a signal that asks for an end came before, and was handed on to it."""


def run(command: Sequence[str], environ: Mapping[str, str], *, grace_s: float) -> CommandEnd:
    """Run a command to its end, and return how it ended.

    A command that a signal ends at once, as a shell does or a script that has spawned the training's processes, may
    leave these behind. They are told too, and awaited: they may be saving.

    Args:
        command: The program and its arguments.
        environ: Its environment.
        grace_s: Seconds from the first signal that asks for an end until whoever sent it kills all processes.

    Raises:
        CommandError: It can't be started.

    """
    early: list[int] = []
    came: dict[int, float] = {}
    child: subprocess.Popen[bytes] | None = None

    def forward(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature of handlers
        came.setdefault(signum, time.monotonic())
        if child is None:
            early.append(signum)
        else:
            _send(child.pid, signum)

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _FORWARDED:
        signal.signal(number, forward)
    try:
        child = subprocess.Popen(list(command), env=dict(environ))
    except FileNotFoundError as error:
        raise CommandError(f"there is no program {command[0]!r}", 127) from error
    except OSError as error:
        raise CommandError(f"{command[0]!r} can't be started: {error}", 126) from error
    for signum in early:
        _send(child.pid, signum)
    code = _await_end(child.pid)
    stops = {signum: came_s for signum, came_s in came.items() if signum in _STOPS}
    if -code in stops:
        _end_orphans(-code, min(stops.values()) + grace_s - _MARGIN_S)
    return CommandEnd(code=code if code >= 0 else _BY_SIGNAL - code, was_told=bool(stops))


def _send(pid: int, signum: int) -> None:
    # Nobody but `_await_end` buries the child, in this same thread: the number is its own until then. A signal may
    # also come after, while the pod's exit code is chosen.
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _await_end(pid: int) -> int:
    """Wait for the child. The first process of a container is the parent of all that have lost theirs."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _end_orphans(signum: int, ends_s: float) -> None:
    """Tell those that the child has left behind to end, and wait for that, until `ends_s` by time.monotonic().

    Whoever these have started comes here when they have ended, and is told then.
    """
    told: set[int] = set()
    with suppress(ChildProcessError):
        while time.monotonic() < ends_s:
            for pid in set(_children()) - told:
                _send(pid, signum)
                told.add(pid)
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                time.sleep(_LOOK_S)
            # Another process may get its number.
            told.discard(ended)


def _children() -> Iterator[int]:
    for children in Path("/proc/self/task").glob("*/children"):
        yield from map(int, children.read_text().split())
