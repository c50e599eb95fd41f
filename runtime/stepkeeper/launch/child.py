"""Run a command as the first process of a container does: hand signals on, and bury whom others leave behind."""

import ctypes
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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

_TORCHRUNS_END_S: Final = 5.0
"""Seconds that torchrun has for its own end behind its last rank's. On a busy machine that may take longer than the pod
has left, and the pod would end with the kernel's code in place of the training's.
"""

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

    died_alone: bool = False
    """True if that signal ended it, and no process was left below it: nothing trained that could have saved."""


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    grace_s: float,
    may_leave: Callable[[], bool] = lambda: False,
) -> CommandEnd:
    """Run a command to its end, and return how it ended.

    A command that a signal ends at once, as a shell does or a script that has spawned the training's processes, may
    leave these behind. They are told too, and awaited: they may be saving.

    Args:
        command: The program and its arguments.
        environ: Its environment.
        grace_s: Seconds from the first signal that asks for an end until whoever sent it kills all processes.
        may_leave: Tells whether the command need not be waited for any longer, shortly before the kill that SIGTERM
            announces, or when a torchrun takes long to end behind its last rank. This process's end is to end it then,
            as that of a container's first process does.

    Raises:
        CommandError: It can't be started.

    """
    early: list[int] = []
    came: dict[int, float] = {}
    child: subprocess.Popen[bytes] | None = None
    stop = _Stop(may_leave)

    def forward(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature of handlers
        came.setdefault(signum, time.monotonic())
        if child is None:
            early.append(signum)
        elif signum == signal.SIGTERM:
            stop.tell(child.pid, came[signum] + grace_s - _MARGIN_S)
        else:
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
    stop.end()
    stops = {signum: came_s for signum, came_s in came.items() if signum in _STOPS}
    died_alone = -code in stops and not any(children_of(os.getpid()))
    if -code in stops:
        _end_orphans(-code, min(stops.values()) + grace_s - _MARGIN_S)
    return CommandEnd(
        code=code if code >= 0 else _BY_SIGNAL - code, was_told=bool(stops), died_alone=died_alone
    )


class _LeaveError(Exception):
    """The command isn't waited for any longer."""


class _Stop:
    """Stop the command. The ranks of a torchrun are told first, torchrun itself when the first of them has ended.

    All of it runs in signal handlers of the main thread, which waits for the command meanwhile.
    """

    def __init__(self, may_leave: Callable[[], bool]) -> None:
        """Tell nobody yet. `may_leave` is that of `run`."""
        self._may_leave = may_leave
        self._ranks: tuple[Rank, ...] = ()
        self._is_torchrun = False
        """True if the command has started the ranks itself. What a shell does behind its torchrun is waited for."""
        self._command_is_told = False
        self._leave_s = math.inf
        self._has_ended = False

    def end(self) -> None:
        """Tell nobody any more: the command isn't awaited any longer."""
        self._has_ended = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def tell(self, pid: int, ends_s: float) -> None:
        """Tell the command, or its ranks first.

        Args:
            pid: The command's process.
            ends_s: When the command is told in any case, and left if it may be, by time.monotonic().

        """
        if self._has_ended:
            return
        if not self._tell_ranks(pid):
            self._command_is_told = True
            _send(pid, signal.SIGTERM)
        self._leave_s = min(self._leave_s, ends_s)

        def look(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature of handlers
            self._look(pid)

        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_AT_RANKS_S, _LOOK_AT_RANKS_S)

    def _tell_ranks(self, pid: int) -> bool:
        """Tell the ranks below the command. Return False if there are none, or one that doesn't heed it yet."""
        if self._ranks:
            return True
        ranks = find_ranks(pid)
        if not ranks or not all(rank.heeds_sigterm for rank in ranks):
            return False
        self._ranks = ranks
        self._is_torchrun = {rank.pid for rank in ranks} <= set(children_of(pid))
        for rank in ranks:
            rank.tell()
        return True

    def _look(self, pid: int) -> None:
        """Do what it is time for. Raises _LeaveError when the command has had its time."""
        if self._has_ended:
            return
        now_s = time.monotonic()
        ended = [rank.has_ended for rank in self._ranks]
        if not self._command_is_told and (now_s >= self._leave_s or any(ended)):
            self._command_is_told = True
            _send(pid, signal.SIGTERM)
        if self._is_torchrun and all(ended):
            self._leave_s = min(self._leave_s, now_s + _TORCHRUNS_END_S)
        if now_s >= self._leave_s:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            if self._may_leave():
                self._has_ended = True
                raise _LeaveError


def _send(pid: int, signum: int) -> None:
    # Nobody but `_await_end` buries the child, in this same thread: the number is its own until then. A signal may
    # also come after, while the pod's exit code is chosen.
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _await_end(pid: int) -> int:
    """Wait for the child. The first process of a container is the parent of all that have lost theirs.

    One that is left is about to be killed, and counts as killed.
    """
    with suppress(_LeaveError):
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == pid:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                return os.waitstatus_to_exitcode(status)
    return -signal.SIGKILL


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
