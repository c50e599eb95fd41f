"""Read the stacks of the trainer's threads, even if it hangs, and watch its steps. This is the companion's part."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from stepkeeper.stacks.dumping import StackDumper
from stepkeeper.stacks.mesh import MeshHost
from stepkeeper.stacks.stack_file import END_OF_STACKS

__all__ = ["StackReader", "StackRequest", "open_stacks"]

_ANSWER_S: Final = 2.0
"""Seconds after which a trainer that hasn't written its stacks has a held GIL or no CPU."""

_SIGNALLED_S: Final = 2.0
_SETTLED_S: Final = 0.2
"""Stacks that C code writes have no end mark: they are complete if nothing is added for this time."""

_LOOK_S: Final = 0.02


class StackReader:
    """Read the memory into which the trainer writes its stacks. One thread uses this object."""

    def __init__(self, fd: int, ask: Callable[[int], object], send_signal: Callable[[], None]) -> None:
        """Store the arguments; nothing is read yet. The memory's descriptor `fd` stays open.

        `ask` requests the stacks from the trainer's Python code, which writes the given number after them.
        `send_signal` requests them from C code, which writes no number.
        """
        self._fd = fd
        self._ask = ask
        self._send_signal = send_signal
        self._n_asked = 0

    def read(self) -> str:
        """Return the stacks of all threads of the trainer; an empty text if they can't be read."""
        os.ftruncate(self._fd, 0)
        self._n_asked += 1
        end = f"{END_OF_STACKS} {self._n_asked}\n"
        self._ask(self._n_asked)
        if _wait(lambda: self._text().endswith(end), _ANSWER_S):
            return self._text().removesuffix(end)
        # Second: C code walks the stacks without the GIL, which is safe only while no Python code runs.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRequest:
    """The way in which a companion reads its trainer's stacks.

    The descriptor of their memory is sent along, and in rank 0 that of a listening socket if others connect.
    """

    signal: int | None
    """The signal that makes the trainer write its stacks in C code; None without a free signal."""

    least_millis: int | None = None
    """Milliseconds that any step may take; None: steps aren't watched."""

    secret: str | None = None
    """The secret that proves a caller to be a rank of this training; None where no rank connects."""


def open_stacks(
    request: StackRequest,
    rank: int,
    fds: Sequence[int],
    *,
    ask: Callable[[int], None],
    signal_trainer: Callable[[int], None],
    on_dumped: Callable[[str], None],
) -> StackDumper:
    """Start to watch the steps of one trainer, whose stacks are dumped with those of other ranks.

    This copies the descriptors that were sent along. `ask` asks the trainer for its stacks, with a number.
    Rank 0 calls `on_dumped` with those of all ranks, shortened.
    """

    def send_signal() -> None:
        if request.signal is not None:
            signal_trainer(request.signal)

    reader = StackReader(os.dup(fds[0]), ask, send_signal)
    least_s = None if request.least_millis is None else request.least_millis / 1000
    dumper = StackDumper(rank, reader.read, least_s=least_s, on_dumped=on_dumped)
    if request.secret is not None:
        listener = socket.socket(fileno=os.dup(fds[1]))
        dumper.mesh = MeshHost(listener, bytes.fromhex(request.secret), dumper.receive)
    return dumper
