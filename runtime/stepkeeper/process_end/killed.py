"""Leave the last word of a process that a signal has ended: the kernel knows of that until its parent has waited."""

import signal
from pathlib import Path
from typing import Final

from stepkeeper.contract import CommitPoint, Identity, Termination
from stepkeeper.process_end.last_words import count_restarts, leave_word_for_another

__all__ = ["KernelRecord", "leave_word_of_killed"]

_STATE: Final = 0
_STARTED: Final = 19
_EXIT: Final = 49
"""Places in /proc/PID/stat, counted from behind the program's name (proc(5): fields 3, 22 and 52)."""

_STOPPED: Final = frozenset("Tt")
"""States in which the last place names the signal that stopped the process."""

_SIGNAL_MASK: Final = 0x7F
_BY_SIGNAL: Final = 128
"""Added to a signal's number, makes the exit code that shells and the kubelet give to a process which it ended."""


class KernelRecord:
    """The kernel's record of one process of this user."""

    def __init__(self, pid: int) -> None:
        """Know the process `pid`, which runs."""
        self._pid = pid
        fields = self._read()
        self._started = None if fields is None else fields[_STARTED]

    def read_end_signal(self) -> int | None:
        """Return the number of the signal that ended the process.

        None if it runs, or ended otherwise; or if its parent has waited for it already, or nobody may look.
        """
        fields = self._read()
        if fields is None or fields[_STARTED] != self._started or fields[_STATE] in _STOPPED:
            return None
        return int(fields[_EXIT]) & _SIGNAL_MASK or None

    def _read(self) -> list[str] | None:
        try:
            text = Path(f"/proc/{self._pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        # The program's name stands in parentheses, and may have any characters, these too.
        fields = text.rpartition(")")[2].split()
        return fields if len(fields) > _EXIT else None


def leave_word_of_killed(
    pod: Identity, rank: int, number: int, *, step: int | None, restored: CommitPoint | None
) -> None:
    """Leave the last word of a rank that a signal has ended, where the kubelet looks for it.

    Args:
        pod: The rank's pod.
        rank: The rank.
        number: The signal's number.
        step: The last step that the rank has finished.
        restored: The commit that it restored last.

    """
    word = Termination(
        code=_BY_SIGNAL + number,
        step=step,
        restored=restored,
        error=f"rank {rank} was ended by signal {number} ({_name_of(number)})",
        rank=rank,
        restart=count_restarts(),
    )
    leave_word_for_another(Path(pod.termination_file), word)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # One between SIGRTMIN and SIGRTMAX.
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
