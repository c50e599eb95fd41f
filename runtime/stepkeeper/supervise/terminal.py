"""Print a run's events, one line each, and its progress on a line that a terminal rewrites."""

import sys
from typing import Final, TextIO

__all__ = ["RunTerminal"]

_CLEAR: Final = "\r\x1b[K"


class RunTerminal:
    """Print to stderr, beside the output of the training."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown: str | None = None

    def print_line(self, text: str) -> None:
        """Print an event."""
        clear = _CLEAR if self._stream.isatty() else ""
        self._write(f"{clear}stepkeeper: {text}\n")
        self._shown = None

    def show_progress(self, text: str | None) -> None:
        """Show the progress where the stream is a terminal, and nowhere else.

        The cursor returns to the beginning of the line, so that a line of the training's own replaces the text.
        """
        if self._stream.isatty() and text is not None and text != self._shown:
            self._write(f"{_CLEAR}{text}\r")
            self._shown = text

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal is gone: the training continues, or has had its notice by SIGHUP
            pass
