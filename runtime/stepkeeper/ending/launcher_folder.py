"""Let `python -m stepkeeper.launch` know which processes below it take SIGTERM as a notice.

Each of them has a file in a folder of the launcher. The launcher sends SIGTERM to them alone. The file's name
distinguishes a process from one that gets its number later, and from the one with this number in another PID namespace.
torchrun hands SIGTERM on to whole sessions, which ends what loads the ranks' data while they still train, and kills all
of them 30 s later.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from stepkeeper.contract import LAUNCHER_VARIABLE
from stepkeeper.kernel_record import KernelRecord

__all__ = ["list_ranks", "sign_off", "sign_on"]

_OWN_ONLY: Final = 0o600
_OWN_NAMESPACE: Final = Path("/proc/self/ns/pid")


def sign_on() -> None:
    """Ask the launcher, if there is one, to send SIGTERM to this process. Without its folder the command gets it."""
    if (path := _own_file()) is not None:
        with suppress(OSError):
            path.touch(_OWN_ONLY)


def sign_off() -> None:
    """Ask the launcher to send no SIGTERM to this process any more: it would die of it."""
    if (path := _own_file()) is not None:
        with suppress(OSError):
            path.unlink()


def list_ranks(folder: Path) -> frozenset[int]:
    """Return the numbers of the processes that have signed on in the launcher's folder and still run.

    Those of another PID namespace aren't among them: their numbers mean other processes here.
    """
    signed = {path.name: int(path.name.partition("-")[0]) for path in folder.glob("[1-9]*-*")}
    return frozenset(
        pid for name, pid in signed.items() if name == _name(pid) and not KernelRecord(pid).has_ended()
    )


def _own_file() -> Path | None:
    folder = os.environ.get(LAUNCHER_VARIABLE)
    return Path(folder, _name(os.getpid())) if folder else None


def _name(pid: int) -> str:
    """Return the name of the process's file: its number, when it began, and this process's PID namespace."""
    namespace = _OWN_NAMESPACE.stat().st_ino if _OWN_NAMESPACE.exists() else None
    return f"{pid}-{KernelRecord(pid).started}-{namespace}"
