"""Find the processes that torchrun has started for the training, below the launcher, and tell them alone to stop.

torchrun hands SIGTERM on to whole sessions, so that it also ends what loads the ranks' data while they still train, and
kills them all 30 s later.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepkeeper.contract import TORCHRUN_VARIABLE
from stepkeeper.process_end.kernel_record import KernelRecord

__all__ = ["Rank", "children_of", "find_ranks", "send_signal"]

_PROC: Final = Path("/proc")
_MARK: Final = f"{TORCHRUN_VARIABLE}=".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A process of the training."""

    pid: int
    record: KernelRecord

    @property
    def has_ended(self) -> bool:
        """True if it has ended, also if nobody has waited for it yet."""
        return self.record.has_ended()

    @property
    def heeds_sigterm(self) -> bool:
        """True if it handles SIGTERM. Before there is a manager it would die of the signal."""
        with suppress(OSError, ValueError):
            for line in (_PROC / str(self.pid) / "status").read_text().splitlines():
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) & 1 << signal.SIGTERM - 1)
        return False

    def tell(self) -> None:
        """Tell it to stop."""
        send_signal(self.pid, signal.SIGTERM)


def find_ranks(below: int) -> tuple[Rank, ...]:
    """Return the processes that torchruns below a process have started; not what those have started themselves."""
    found: list[Rank] = []
    for pid in children_of(below):
        if not _is_rank(pid):
            found.extend(find_ranks(pid))
        elif not (record := KernelRecord(pid)).has_ended():
            found.append(Rank(pid=pid, record=record))
    return tuple(found)


def send_signal(pid: int, signum: int) -> None:
    """Send a signal to a process, if there is one of that number."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return
    except PermissionError:
        name = signal.Signals(signum).name
        sys.stderr.write(f"stepkeeper.launch: process {pid} is another user's, and isn't told {name}\n")


def children_of(pid: int) -> Iterator[int]:
    """Return the processes whose parent is `pid`; none if it ends meanwhile."""
    with suppress(OSError):
        for children in (_PROC / str(pid) / "task").glob("*/children"):
            with suppress(OSError):
                yield from map(int, children.read_text().split())


def _is_rank(pid: int) -> bool:
    try:
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(each.startswith(_MARK) for each in variables)
