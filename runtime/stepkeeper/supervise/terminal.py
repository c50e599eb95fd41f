"""Print a run's events, one line each, and its progress on a line that a terminal rewrites."""

import sys
from dataclasses import dataclass, field
from typing import Final, TextIO

__all__ = ["RunTerminal"]

_CLEAR: Final = "\r\x1b[K"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerminal:
    """Print to stderr, beside the output of the training."""

    label: str = ""
    """The beginning of each event."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)

    def print_line(self, text: str) -> None:
        """Print an event."""
        clear = _CLEAR if self.stream.isatty() else ""
        self._write(f"{clear}stepkeeper: {self.label}{text}\n")

    def show_progress(self, text: str | None) -> None:
        """Show the progress where the stream is a terminal, and nowhere else.

        The cursor returns to the beginning of the line, so that a line of the training's own replaces the text.
        """
        if self.stream.isatty() and text is not None:
            self._write(f"{_CLEAR}{text}\r")

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # the terminal is gone: the training continues, or has had its notice by SIGHUP
            pass
