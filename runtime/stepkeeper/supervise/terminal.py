"""Print a run's events, one line each."""

import sys
from dataclasses import dataclass, field
from typing import TextIO

__all__ = ["RunTerminal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerminal:
    """Print to stderr, beside the output of the training."""

    label: str = ""
    """The beginning of each event."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)

    def print_line(self, text: str) -> None:
        """Print an event."""
        try:
            self.stream.write(f"stepkeeper: {self.label}{text}\n")
            self.stream.flush()
        except OSError:  # the terminal is gone: the training continues, or has had its notice by SIGHUP
            pass
