"""Register the processes that save at SIGTERM with `python -m stepkeeper.launch`, which sends it to them first.

The command that the launcher runs, such as torchrun, gets it when they have ended. torchrun would forward it to whole
sessions, which ends the ranks' data loaders while the ranks still train, and would kill all of them 30 s later.

Each registered process has a file in a folder of the launcher. The file's name distinguishes the process from a later
one with the same pid, and from one in another PID namespace.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from stepkeeper.contract import LAUNCHER_VARIABLE
from stepkeeper.kernel_record import KernelRecord

__all__ = ["list_registered", "register"]

_MODE: Final = 0o600
_OWN_NAMESPACE: Final = Path("/proc/self/ns/pid")


def register() -> None:
    """Register this process with the launcher, if there is one, to get SIGTERM before the command does."""
    if folder := os.environ.get(LAUNCHER_VARIABLE):
        with suppress(OSError):
            Path(folder, _name(os.getpid())).touch(_MODE)


def list_registered(folder: Path) -> frozenset[int]:
    """Return the pids of the registered processes that still run, in this PID namespace."""
    pids = {path.name: int(path.name.partition("-")[0]) for path in folder.glob("[1-9]*-*")}
    return frozenset(
        pid for name, pid in pids.items() if name == _name(pid) and not KernelRecord(pid).has_ended()
    )


def _name(pid: int) -> str:
    """Return the name of the process's file: its pid, its start time, and this process's PID namespace."""
    namespace = _OWN_NAMESPACE.stat().st_ino if _OWN_NAMESPACE.exists() else None
    return f"{pid}-{KernelRecord(pid).started}-{namespace}"
