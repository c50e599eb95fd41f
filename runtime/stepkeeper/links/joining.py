"""Find the addresses of other ranks, and make authenticated connections to them."""

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from stepkeeper.links.handshake import connect, identify_caller, listen
from stepkeeper.loggers import logger

__all__ = ["Joining", "addresses_of_host", "connect_to_rank", "shut"]

_log: Final = logger(__name__)
_CALL_TIMEOUT_S: Final = 5.0
"""The time for connecting to each possible address of a rank."""


class Joining:
    """Accept connections from some of the other ranks, and connect to others, all with one secret."""

    def __init__(
        self, rank: int, on_join: Callable[[int, socket.socket], None], listener: socket.socket | None = None
    ) -> None:
        """Listen, on a free port unless a `listener` is given. A thread calls `on_join` with each rank."""
        self._rank = rank
        self._on_join = on_join
        self._listener = listen() if listener is None else listener
        self.port: Final = int(self._listener.getsockname()[1])
        self._secret = b""
        self._closed = False

    def start(self, secret: bytes) -> None:
        """Accept connections from callers that know the secret."""
        self._secret = secret
        threading.Thread(target=self._accept, name="links", daemon=True).start()

    def connect(self, peer: int, address: Mapping[str, Any]) -> socket.socket:
        """Connect to a rank by the first of its addresses that works. Raises OSError if none does."""
        return connect_to_rank(self._rank, peer, address, self._secret)

    def close(self) -> None:
        """Accept no more connections. Existing ones stay open."""
        self._closed = True
        shut(self._listener, socket.SHUT_RDWR)
        self._listener.close()

    def forget_after_fork(self) -> None:
        """Close this copy of the listening socket in a forked child. The parent keeps listening."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(sock,), name="links-greet", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            rank = identify_caller(sock, self._rank, self._secret)
        except OSError as error:
            _log.debug("refused a connection to the port for other ranks: %s", error)
            sock.close()
            return
        self._on_join(rank, sock)


def connect_to_rank(rank: int, peer: int, address: Mapping[str, Any], secret: bytes) -> socket.socket:
    """Connect to `peer` by the first of its addresses that works. Raises OSError if none does."""
    tried: list[str] = []
    for host in address["hosts"]:
        try:
            return connect(host, address["port"], (rank, peer), secret, _CALL_TIMEOUT_S)
        except OSError as error:
            tried.append(f"{host}: {error}")
    raise ConnectionError(
        f"rank {rank} can't reach rank {peer} on port {address['port']} ({'; '.join(tried)})"
    )


def addresses_of_host(towards: str | None) -> list[str]:
    """List the addresses at which other hosts may reach this one, likeliest first."""
    found: dict[str, None] = {}
    if towards is not None:
        for family, *_, address in _looked_up(towards):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as sock:
                    # This sends nothing: the kernel chooses the address that this host would send from.
                    sock.connect(address)
                    found[str(sock.getsockname()[0])] = None
            except OSError:
                # There is no route for this family: a host may have no IPv6.
                continue
    found.update((str(address[0]), None) for *_, address in _looked_up(socket.gethostname()))
    # Ranks on one host can always use this address.
    found["127.0.0.1"] = None
    return list(found)


def _looked_up(host: str) -> list[Any]:
    try:
        return list(socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM))
    except OSError:
        return []


def shut(sock: socket.socket, how: int) -> None:
    """Shut a connection down for reading, writing or both, if it is open."""
    with suppress(OSError):
        sock.shutdown(how)
