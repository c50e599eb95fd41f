"""Start the companion's program, which imports the same packages as its trainer, with a channel between both."""

import os
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from stepkeeper.companion.channel import Channel
from stepkeeper.companion.processes import ChildProcess, start_process

__all__ = ["companion_environment", "start_companion"]

_END_NUMBERS: Final = (3, 4)
"""File descriptors that the process may get its end of the socket as."""


def companion_environment() -> dict[str, str]:
    """Build the environment of a companion process: this one's, in which it finds the same packages."""
    python_path = os.pathsep.join(filter(None, [*_package_folders(), os.environ.get("PYTHONPATH", "")]))
    # With arenas of their own, its threads would keep freed memory: as much again as the process needs.
    return {**os.environ, "PYTHONPATH": python_path, "MALLOC_ARENA_MAX": "1"}


def start_companion(env: Mapping[str, str]) -> tuple[Channel, ChildProcess]:
    """Start a companion process, and return this end of its channel.

    Args:
        env: All of its environment, from `companion_environment`.

    Raises:
        OSError: It can't be started.

    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = next(number for number in _END_NUMBERS if number != theirs.fileno())
    command = [sys.executable, "-P", "-m", "stepkeeper.companion", str(number), str(os.getpid())]
    with theirs:
        try:
            return Channel(ours), start_process(command, env, theirs.fileno(), number)
        except BaseException:
            ours.close()
            raise


def _package_folders() -> list[str]:
    """List the folders that the trainer imports the packages from, however it found them."""
    folders = [Path(__file__).parents[2]]
    planners = find_spec("stepkeeper_planners")
    if planners is not None and planners.origin is not None:
        folders.append(Path(planners.origin).parents[1])
    return list(dict.fromkeys(map(str, folders)))
