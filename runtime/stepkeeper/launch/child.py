"""Run a command as the first process of a container does: hand signals on, and bury whom others leave behind."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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


def run(command: Sequence[str], environ: Mapping[str, str]) -> CommandEnd:
    """Run a command to its end, and return how it ended.

    Args:
        command: The program and its arguments.
        environ: Its environment.

    Raises:
        CommandError: It can't be started.

    """
    early: list[int] = []
    came: set[int] = set()
    child: subprocess.Popen[bytes] | None = None

    def forward(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature of handlers
        came.add(signum)
        if child is None:
            early.append(signum)
        else:
            _send(child.pid, signum)

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
    return CommandEnd(code=code, was_told=not _STOPS.isdisjoint(came))


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
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else _BY_SIGNAL - code
