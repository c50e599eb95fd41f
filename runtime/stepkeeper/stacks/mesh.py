"""Carry stack requests and stacks between the companions, each of which is connected with rank 0's.

The companions communicate, not the trainers: in a trainer with a held GIL no thread could.
"""

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from stepkeeper.links.joining import Joining, connect_to_rank

__all__ = ["MeshCaller", "MeshHost"]

_PAUSES_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
_LINE_LIMIT_BYTES: Final = 1 << 20
_SEND_TIMEOUT: Final = struct.pack("ll", 2, 0)
"""Seconds and microseconds, in the kernel's format. A timeout of Python's socket would end reads too."""

Receive = Callable[[int, dict[str, Any]], None]
"""Called with the sender's rank and the message, in the thread of that rank's connection."""


class MeshHost:
    """Rank 0's end of all connections."""

    def __init__(self, listener: socket.socket, secret: bytes, receive: Receive) -> None:
        """Accept connections at the `listener` from callers that know the secret."""
        self._receive = receive
        self._lock = threading.Lock()
        self._socks: dict[int, socket.socket] = {}
        self._joining = Joining(0, self._add, listener)
        self._joining.start(secret)

    def send(self, message: Mapping[str, Any]) -> int:
        """Send a message to all other ranks. Return the number of receivers."""
        with self._lock:
            socks = list(self._socks.values())
        return sum(_send(sock, message) for sock in socks)

    def _add(self, rank: int, sock: socket.socket) -> None:
        with self._lock:
            self._socks[rank] = sock
        with suppress(OSError):
            _receive_lines(sock, lambda message: self._receive(rank, message))
        with self._lock:
            if self._socks.get(rank) is sock:
                del self._socks[rank]
        sock.close()


class MeshCaller:
    """Another rank's end. It reconnects when the connection is lost, since rank 0 may have a new companion."""

    def __init__(self, rank: int, address: Mapping[str, Any], receive: Receive) -> None:
        """Connect to rank 0's companion, at the `address` that its trainer described."""
        self._rank = rank
        self._address = address
        self._receive = receive
        self._sock: socket.socket | None = None
        threading.Thread(target=self._run, name="stacks-call", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> int:
        """Send a message to rank 0. Return the number of receivers."""
        sock = self._sock
        return 0 if sock is None else _send(sock, message)

    def _run(self) -> None:
        n_failures = 0
        while True:
            try:
                self._sock = connect_to_rank(
                    self._rank, 0, self._address, bytes.fromhex(self._address["secret"])
                )
                n_failures = 0
                _receive_lines(self._sock, lambda message: self._receive(0, message))
            except OSError as error:
                if n_failures == 0:  # one message for all retries
                    complain = f"connecting to rank 0 for stacks failed, retrying: {error}"
                    print(f"stepkeeper: {complain}", file=sys.stderr, flush=True)  # noqa: T201  # a process's own log
            sock, self._sock = self._sock, None
            if sock is not None:
                sock.close()
            time.sleep(_PAUSES_S[min(n_failures, len(_PAUSES_S) - 1)])
            n_failures += 1


def _send(sock: socket.socket, message: Mapping[str, Any]) -> bool:
    """Send a line. A rank that receives nothing for two seconds has no companion that could answer."""
    line = json.dumps(message).encode() + b"\n"
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        sock.sendall(line)
    except OSError:
        return False
    return True


def _receive_lines(sock: socket.socket, receive: Callable[[dict[str, Any]], None]) -> None:
    """Call `receive` with each line, until the connection ends. Raises OSError."""
    with sock.makefile("rb") as lines:
        while line := lines.readline(_LINE_LIMIT_BYTES):
            try:
                message = json.loads(line)
            except ValueError as error:
                raise ConnectionError("received a line that is not a message") from error
            receive(message)
