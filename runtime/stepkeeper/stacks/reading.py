"""Get the stacks of the trainer's threads, whatever it is doing: the companion's part."""

import os
import time
from collections.abc import Callable
from typing import Final

from stepkeeper.stacks.stack_file import END_OF_STACKS

__all__ = ["StackReader"]

_ANSWER_S: Final = 2.0
"""Seconds after which a trainer that hasn't written its stacks holds Python's lock, or has no processor."""

_SIGNALLED_S: Final = 2.0
_SETTLED_S: Final = 0.2
_LOOK_S: Final = 0.02


class StackReader:
    """Read the memory that the trainer writes its stacks into. One thread uses it."""

    def __init__(self, fd: int, ask: Callable[[int], object], send_signal: Callable[[], None]) -> None:
        """Read nothing yet.

        Args:
            fd: The memory's file descriptor, which this closes never.
            ask: Asks the trainer to write its stacks, and the given number after them.
            send_signal: Makes the trainer's process write its stacks, without a number, in C code.

        """
        self._fd = fd
        self._ask = ask
        self._send_signal = send_signal
        self._n_asked = 0

    def read(self) -> str:
        """Return the stacks of all threads of the trainer; an empty text if there is no way to them."""
        os.ftruncate(self._fd, 0)
        self._n_asked += 1
        end = f"{END_OF_STACKS} {self._n_asked}\n"
        self._ask(self._n_asked)
        if _wait(lambda: self._text().endswith(end), _ANSWER_S):
            return self._text().removesuffix(end)
        # Only now: this walks the stacks without Python's lock, which is safe where nothing of Python runs.
        self._send_signal()
        _wait(lambda: bool(self._text()), _SIGNALLED_S)
        return self._settled_text().removesuffix(end)

    def _settled_text(self) -> str:
        text, ends_s = self._text(), time.monotonic() + _SIGNALLED_S
        while time.monotonic() < ends_s:
            time.sleep(_SETTLED_S)
            before, text = text, self._text()
            if text == before:
                break
        return text

    def _text(self) -> str:
        size_bytes = os.fstat(self._fd).st_size
        return os.pread(self._fd, size_bytes, 0).decode(errors="replace")


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= ends_s:
            return False
        time.sleep(_LOOK_S)
    return True
