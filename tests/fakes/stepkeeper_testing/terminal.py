"""Read what a command prints while it runs."""

import subprocess
import threading
from typing import Final

PATIENCE_S: Final = 200


class Terminal:
    """The process of a command, and the lines that it prints."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lines = process, list[str]()
        self._came = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                with self._came:
                    self.lines.append(line)
                    self._came.notify_all()
        with self._came:
            self._is_over = True
            self._came.notify_all()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def until(self, text: str) -> None:
        """Wait for a line with the text."""
        with self._came:
            assert self._came.wait_for(lambda: text in self.text or self._is_over, PATIENCE_S), self.text
        assert text in self.text, self.text

    def end(self) -> int:
        """Wait for the end, and return the exit code."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code
