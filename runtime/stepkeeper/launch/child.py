"""Run a command as the first process of a container does: hand signals on, and bury whom others leave behind."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from stepkeeper.contract import LAUNCHER_VARIABLE
from stepkeeper.launch.heard import Signals
from stepkeeper.launch.ranks import children_of, send_signal
from stepkeeper.launch.stopping import Stop

__all__ = ["CommandEnd", "CommandError", "run"]

_FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_BY_SIGNAL: Final = 128
_PR_SET_CHILD_SUBREAPER: Final = 36
_LOOK_S: Final = 0.05


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
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with Signals(_FORWARDED) as signals:
        child = _start(command, {**environ, LAUNCHER_VARIABLE: "1"})
        stop = Stop(child.pid, grace_s, may_leave)
        code = _await_end(child.pid, signals, stop)
        was_ended_by_it = code < 0 and stop.was_told(-code)
        died_alone = was_ended_by_it and not any(children_of(os.getpid()))
        if was_ended_by_it:
            _end_orphans(-code, signals, stop.ends_s)
    return CommandEnd(
        code=code if code >= 0 else _BY_SIGNAL - code, was_told=stop.was_told(), died_alone=died_alone
    )


def _start(command: Sequence[str], environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(list(command), env=environ)
    except FileNotFoundError as error:
        raise CommandError(f"there is no program {command[0]!r}", 127) from error
    except OSError as error:
        raise CommandError(f"{command[0]!r} can't be started: {error}", 126) from error


def _await_end(pid: int, signals: Signals, stop: Stop) -> int:
    """Wait for the command, hand signals on to it, and return its exit code; the signal's, negated, if one ended it.

    One that is left is about to be killed, and counts as killed.
    """
    while (code := _bury(pid)) is None:
        for signum in signals.wait(stop.look_s):
            stop.hear(signum)
        if stop.is_over():
            return -signal.SIGKILL
    # They may have come before the end.
    for signum in signals.wait(0.0):
        stop.note(signum)
    return code


def _bury(pid: int) -> int | None:
    """Take note of all children that have ended, and return the exit code of that one; None if it runs.

    The first process of a container is the parent of all that have lost theirs.
    """
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if ended == 0:
            return None


def _end_orphans(signum: int, signals: Signals, ends_s: float) -> None:
    """Tell those that the child has left behind to end, and wait for that, until `ends_s` by time.monotonic().

    Whoever these have started comes here when they have ended, and is told then.
    """
    told: set[int] = set()
    with suppress(ChildProcessError):
        while time.monotonic() < ends_s:
            for pid in set(children_of(os.getpid())) - told:
                send_signal(pid, signum)
                told.add(pid)
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                signals.wait(_LOOK_S)
            # Another process may get its number.
            told.discard(ended)
