"""Put the parts of a companion's stacks together: the reading, the watch, and the way to other ranks."""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepkeeper.stacks.dumping import StackDumper
from stepkeeper.stacks.mesh import MeshHost
from stepkeeper.stacks.reading import StackReader

__all__ = ["StackRequest", "open_stacks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRequest:
    """Tell a companion how to read its trainer's stacks. The descriptor of their memory comes along.

    So does that of a listening socket in rank 0, if other ranks call there.
    """

    signal: int | None
    """The signal that makes the trainer write its stacks in C code; None if it has none for that."""

    least_millis: int | None = None
    """Milliseconds that any step may take; None: steps aren't watched."""

    secret: str | None = None
    """What proves a caller to be a rank of this training; None where nobody calls."""


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

    Args:
        request: What the trainer has told.
        rank: Its rank.
        fds: The descriptors that came along; this copies them.
        ask: Asks the trainer for its stacks, with a number.
        signal_trainer: Sends the trainer a signal.
        on_dumped: Called in rank 0 with the shortened stacks of all ranks.

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
