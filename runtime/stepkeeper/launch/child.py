"""Run a command as the first process of a container does: hand signals on, and bury whom others leave behind."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

from stepkeeper.contract import LAUNCHER_VARIABLE
from stepkeeper.launch.ranks import Rank, children_of, find_ranks

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
_LOOK_AT_RANKS_S: Final = 0.02
"""torchrun looks at its processes ten times a second, and may start them anew when it finds that one has ended."""

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
    stop = _RanksFirst()

    def forward(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature of handlers
        came.setdefault(signum, time.monotonic())
        if child is None:
            early.append(signum)
        elif signum != signal.SIGTERM or not stop.tell(child.pid, came[signum] + grace_s - _MARGIN_S):
            _send(child.pid, signum)

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _FORWARDED:
        signal.signal(number, forward)
    try:
        child = subprocess.Popen(list(command), env={**environ, LAUNCHER_VARIABLE: "1"})
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


class _RanksFirst:
    """Tell the ranks of a torchrun to stop, and torchrun itself when the first of them has ended.

    All of it runs in signal handlers of the main thread, which waits for the command meanwhile.
    """

    def __init__(self) -> None:
        self._ranks: tuple[Rank, ...] = ()

    def tell(self, pid: int, ends_s: float) -> bool:
        """Tell the ranks below the command. Return False if there are none, or one that doesn't heed it yet.

        Args:
            pid: The command's process.
            ends_s: When the command is told in any case, by time.monotonic().

        """
        if self._ranks:
            return True
        ranks = find_ranks(pid)
        if not ranks or not all(rank.heeds_sigterm for rank in ranks):
            return False
        self._ranks = ranks

        def look(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature of handlers
            if time.monotonic() >= ends_s or any(rank.has_ended for rank in ranks):
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                _send(pid, signal.SIGTERM)

        for rank in ranks:
            rank.tell()
        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_AT_RANKS_S, _LOOK_AT_RANKS_S)
        return True


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
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            return os.waitstatus_to_exitcode(status)


def _end_orphans(signum: int, ends_s: float) -> None:
    """Tell those that the child has left behind to end, and wait for that, until `ends_s` by time.monotonic().

    Whoever these have started comes here when they have ended, and is told then.
    """
    told: set[int] = set()
    with suppress(ChildProcessError):
        while time.monotonic() < ends_s:
            for pid in set(children_of(os.getpid())) - told:
                _send(pid, signum)
                told.add(pid)
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                time.sleep(_LOOK_S)
            # Another process may get its number.
            told.discard(ended)
