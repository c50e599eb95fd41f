"""Read the kernel's record of another process: whether it runs, and which signal ended it."""

from pathlib import Path
from typing import Final

__all__ = ["KernelRecord"]

_STATE: Final = 0
_STARTED: Final = 19
_EXIT: Final = 49
"""Positions in /proc/PID/stat, counted after the program's name (proc(5): fields 3, 22 and 52)."""

_STOPPED: Final = frozenset("Tt")
"""States in which the last field is the signal that stopped the process."""

_SIGNAL_MASK: Final = 0x7F
"""The bits of an exit status that hold the signal; 0 if none ended the process."""

_GONE: Final = frozenset("ZX")
"""States of a process that has ended, including one that its parent hasn't reaped."""


class KernelRecord:
    """The kernel's record of one process of this user."""

    def __init__(self, pid: int) -> None:
        """Record the running process `pid`. Another process may get its pid later."""
        self._pid = pid
        fields = self._read()
        self.started: Final = None if fields is None else fields[_STARTED]
        """Its start time, as the kernel writes it; None if there is no such process."""

    def has_ended(self) -> bool:
        """Return True if it has ended, even if its parent hasn't reaped it yet."""
        fields = self._read()
        return fields is None or fields[_STARTED] != self.started or fields[_STATE] in _GONE

    def read_end_signal(self) -> int | None:
        """Return the number of the signal that ended the process; None if none did, or it is unknown."""
        fields = self._read()
        if fields is None or fields[_STARTED] != self.started or fields[_STATE] in _STOPPED:
            return None
        return int(fields[_EXIT]) & _SIGNAL_MASK or None

    def _read(self) -> list[str] | None:
        try:
            text = Path(f"/proc/{self._pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        # The program's name is in parentheses, and may contain any characters, including parentheses.
        fields = text.rpartition(")")[2].split()
        return fields if len(fields) > _EXIT else None
