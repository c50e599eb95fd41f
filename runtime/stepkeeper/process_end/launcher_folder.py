"""Let `python -m stepkeeper.launch` know which processes below it take SIGTERM as a notice.

Each of them has a file in a folder of the launcher, named by its number. The launcher sends SIGTERM to them alone.
torchrun hands it on to whole sessions, which ends what loads the ranks' data while they still train, and kills all of
them 30 s later.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from stepkeeper.contract import LAUNCHER_VARIABLE
from stepkeeper.process_end.kernel_record import KernelRecord

__all__ = ["list_ranks", "sign_off", "sign_on"]

_OWN_ONLY: Final = 0o600


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
    """Return the numbers of the processes that have signed on in the launcher's folder and still run."""
    pids = (int(path.name) for path in folder.glob("[1-9]*"))
    return frozenset(pid for pid in pids if not KernelRecord(pid).has_ended())


def _own_file() -> Path | None:
    folder = os.environ.get(LAUNCHER_VARIABLE)
    return Path(folder, str(os.getpid())) if folder else None
