"""Detect the end of a rank's process at once, by connections that its kernel closes.

The ranks form a tree. Each is connected with its neighbors: one rank above it and a few below it. Nothing is sent,
except one byte by a rank that leaves in order. So a rank that is busy, or holds the GIL for long, is never taken for a
lost one.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from stepkeeper.fork_guard import forget_in_forks, forks_held_back
from stepkeeper.links.joining import Joining, addresses_of_host, connect_to_rank, shut
from stepkeeper.loggers import logger

__all__ = ["PeerLinks", "neighbors"]

_log: Final = logger(__name__)
_CHILDREN: Final = 8
_BYE: Final = b"b"


class PeerLinks:
    """Hold one rank's connections to its neighbors in the tree, and listen to each in a thread."""

    def __init__(self, rank: int, world_size: int, on_lost: Callable[[int, str], None]) -> None:
        """Listen for the ranks below this one. `on_lost` gets each that ends without notice, and why."""
        self._rank = rank
        self._on_lost = on_lost
        self.above, below = neighbors(rank, world_size)
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._socks: list[socket.socket] = []
        self._closed = False
        with forks_held_back():
            self._joining = Joining(rank, self._add_link)
            forget_in_forks(self)
        if below:
            self._joining.start(self._secret)

    def describe(self, towards: str | None) -> dict[str, Any]:
        """Describe this rank's address for the ranks below, which reach the host `towards`, if given."""
        return {"hosts": addresses_of_host(towards), "port": self._joining.port, "secret": self._secret.hex()}

    def connect_above(self, peer: int, address: Mapping[str, Any]) -> None:
        """Connect to `peer`, the rank above this one, at its described `address`. Raises OSError."""
        secret = bytes.fromhex(address["secret"])
        self._add_link(peer, connect_to_rank(self._rank, peer, address, secret))

    def close(self, *, bye: bool) -> None:
        """Close all connections. With `bye`, notify the neighbors that this rank leaves in order."""
        with self._lock:
            self._closed = True
            socks, self._socks = self._socks, []
        self._joining.close()
        for sock in socks:
            if bye:
                try:
                    sock.send(_BYE, socket.MSG_DONTWAIT)
                except OSError:
                    _log.debug("a neighbor left before this rank")
            shut(sock, socket.SHUT_WR if bye else socket.SHUT_RDWR)

    def forget_after_fork(self) -> None:
        """Close this copy of the connections in a forked child, where it would hide the parent's end."""
        self._closed = True
        for sock in self._socks:
            sock.close()
        self._joining.forget_after_fork()

    def _add_link(self, rank: int, sock: socket.socket) -> None:
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._socks.append(sock)
        threading.Thread(target=self._listen, args=(rank, sock), name=f"peer-{rank}", daemon=True).start()

    def _listen(self, rank: int, sock: socket.socket) -> None:
        why = "its process ended without notice"
        last_byte = b""
        try:
            last_byte = sock.recv(1)
        except OSError as error:
            why = f"its host doesn't answer: {error}"
        if last_byte != _BYE and not self._closed:
            self._on_lost(rank, why)
        with self._lock:
            if sock in self._socks:
                self._socks.remove(sock)
        sock.close()


def neighbors(rank: int, world_size: int) -> tuple[int | None, range]:
    """Return the rank above this one in the tree, if any, and the ranks below it. Pure."""
    first = rank * _CHILDREN + 1
    below = range(min(first, world_size), min(first + _CHILDREN, world_size))
    return (None if rank == 0 else (rank - 1) // _CHILDREN), below
