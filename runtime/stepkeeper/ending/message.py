"""Write the termination message, which the kubelet copies into the pod's status. Standard library only.

All processes of a pod share one file. A rank writes its own message. The companion writes for a rank that a signal
killed, and the launcher for a command that never trained. `Termination.replaces` decides which of two messages stands.
"""

import fcntl
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from stepkeeper.contract import CommitPoint, ContractError, EndKind, ExitCode, Identity, Termination
from stepkeeper.loggers import logger

__all__ = ["count_restarts", "exit_for_lost_peer", "read", "withdraw", "write", "write_for_killed"]

_log: Final = logger(__name__)
_LOCK_S: Final = 1.0
"""Seconds for which another process of the pod, which may be stopped, can delay this one's write."""

_MESSAGE_BYTES: Final = 1 << 16
_BY_SIGNAL: Final = 128
"""The number that shells and the kubelet add to a signal's number for the exit code of a killed process."""


def write(path: Path, message: Termination, *, is_for_killed: bool = False) -> None:
    """Write a message, or merge it into another process's message in the file. A failure is logged.

    The kubelet owns the file, so it can't be replaced by another file. It is never emptied first: if this process is
    killed meanwhile, the file has either the earlier message or this one. `is_for_killed`: this process writes for a
    killed one. A message that the killed one wrote itself stays.
    """
    restart = count_restarts() if message.restart is None else message.restart
    message = replace(message, kind=message.kind or EndKind.of(message.code), restart=restart)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd)
            with suppress(ContractError):  # another program's message, or none
                earlier = Termination.from_json(os.pread(fd, _MESSAGE_BYTES, 0))
                if is_for_killed and (earlier.rank, earlier.restart) == (message.rank, message.restart):
                    return
                message = message.join(earlier)
            data = message.to_json()
            # Blanks cover the rest of a longer message until the file is cut: they don't change a JSON text.
            os.pwrite(fd, data.ljust(os.fstat(fd).st_size), 0)
            os.ftruncate(fd, len(data))
        finally:
            os.close(fd)
    except OSError as error:
        _log.warning("writing the termination message to %s failed: %s", path, error)


def write_for_killed(
    pod: Identity, rank: int, number: int, *, step: int | None, restored: CommitPoint | None
) -> None:
    """Write the message of a rank that a signal killed, unless its own or a stronger one is in the file."""
    is_standard = number in set(signal.Signals)
    name = signal.Signals(number).name if is_standard else f"SIGRTMIN+{number - signal.SIGRTMIN}"
    path, error = Path(pod.termination_file), f"signal {number} ({name}) killed rank {rank}"
    message = Termination(
        code=_BY_SIGNAL + number,
        kind=EndKind.KILLED,
        step=step,
        restored=restored,
        error=error,
        first_failure=error,
        rank=rank,
    )
    # The kubelet creates the file. Without a file there is no reader.
    if path.exists():
        write(path, message, is_for_killed=True)


def exit_for_lost_peer(error: Exception) -> NoReturn:
    """End a process that has no manager yet, with a message: a launcher above it ends with another code."""
    _log.error("%s", error)
    if Identity.present(os.environ):
        pod = Identity.from_env(os.environ)
        rank = int(os.environ.get("RANK") or pod.rank)
        write(Path(pod.termination_file), Termination(code=ExitCode.PEER_LOST, error=str(error), rank=rank))
    sys.exit(ExitCode.PEER_LOST)


def read(path: Path) -> Termination | None:
    """Read the message; None if there is none, or another program wrote the file."""
    try:
        return Termination.from_json(path.read_bytes())
    except (OSError, ContractError):
        return None


def withdraw(path: Path) -> None:
    """Empty the file, so that readers use the exit code instead of its message."""
    os.truncate(path, 0)


def count_restarts() -> int | None:
    """Return how often torchrun has restarted its processes; None without torchrun."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else None


def _lock(fd: int) -> None:
    """Lock the file against other processes of the pod until it is closed. Return without the lock after `_LOCK_S`."""
    ends_s = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= ends_s:
                return None
            time.sleep(0.01)
