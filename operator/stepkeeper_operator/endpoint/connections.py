"""Bound what strangers' connections cost: how many are open at once, and how long each may take.

Anybody who reaches a port can open any number of connections and leave them unused. A full server makes room: the
address with most connections loses its oldest. Pods have addresses of their own, so a crowd displaces only itself.
Where no address has more than one, a newcomer waits, and others wait in the kernel.
"""

import asyncio
import itertools
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

from typing_extensions import override

__all__ = ["Limits", "Listener", "Peer", "find_displaced"]

_log = logging.getLogger(__name__)

_BACKLOG: Final = 4096
"""Connections that wait in the kernel. It lets others wait a second before they may try again."""

_AT_ONCE: Final = 500
"""Connections to accept before everything else gets its turn."""

_RECEIVED_BYTES: Final = 32 * 1024
"""Bytes that the kernel holds of a connection that is not read, which count as the container's memory."""

_PAUSE_S: Final = 0.1
"""Seconds to wait after a connection could not be accepted, and before looking for a place once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one server."""

    connections: int = 100
    """Connections that are open at once. With TLS, one takes up to a MiB."""

    patience_s: float = 5.0
    """Seconds for a handshake, and as many for the request and its answer. Companions wait as long."""

    received_bytes: int = 128 * 1024
    """Bytes that a connection may send in all. A report has half of that, and a head of few KiB."""

    fair_s: float = 2.0
    """Seconds for the head of a request, after which a connection gives way to one from an address with as many."""


@dataclass(slots=True, eq=False)
class Peer:
    """The other end of a connection: its address, when it got its place, and whether it has sent a request's head."""

    address: str
    since_s: float
    has_asked: bool = False


def find_displaced(peers: Iterable[Peer], newcomer: Peer, fair_s: float) -> Peer | None:
    """Choose the peer that gives way to the newcomer: the oldest from an address with most of them.

    Args:
        peers: All that have a connection now, oldest first.
        newcomer: One more.
        fair_s: Seconds to ask in, for a peer whose address has no more than the newcomer's. One that has asked stays.

    Returns:
        The peer, or None if none gives way.
    """
    known = tuple(peers)
    n_from = Counter(peer.address for peer in (*known, newcomer))
    most = max(n_from.values())
    crowd = (peer for peer in known if n_from[peer.address] == most)
    if n_from[newcomer.address] < most:
        return next(crowd)
    return next((p for p in crowd if not p.has_asked and newcomer.since_s - p.since_s >= fair_s), None)


class _Connection(asyncio.Protocol):
    """Pass everything on to the handler, and know when the peer has asked and when the connection has ended."""

    def __init__(self, peer: Peer, sock: socket.socket, handler: asyncio.Protocol, most_bytes: int) -> None:
        self.peer = peer
        self.sock = sock
        self.ended = asyncio.Event()
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._left_bytes = most_bytes
        self._last = b""

    def abort(self) -> None:
        """Close the connection now, whatever its state is."""
        if self._transport is not None:
            self._transport.abort()
            return
        # It belongs to asyncio, which closes it once it finds that it has ended; if it has, it can't be shut down.
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._handler.connection_made(transport)

    @override
    def data_received(self, data: bytes) -> None:
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            self.abort()
            return
        if not self.peer.has_asked:
            unseen = self._last + data
            self.peer.has_asked = b"\r\n\r\n" in unseen
            self._last = unseen[-3:]
        self._handler.data_received(data)

    @override
    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    @override
    def pause_writing(self) -> None:
        self._handler.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._handler.resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._handler.connection_lost(exc)
        self.ended.set()


class Listener:
    """Accept connections for a server, within limits."""

    def __init__(
        self,
        make_handler: Callable[[], asyncio.Protocol],
        *,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        limits: Limits,
    ) -> None:
        """Listen, and accept from now on. Port 0 picks a free one.

        Args:
            make_handler: Makes the protocol that serves a connection.
            host: Address to listen at.
            port: Port to listen at.
            tls: The certificate to serve; None serves plain connections.
            limits: What all connections may take together, and each of them.

        Raises:
            OSError: The port is taken.
        """
        self._make_handler = make_handler
        self._tls = tls
        self._limits = limits
        self._open: dict[Peer, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED_BYTES)
        self.port: int = self._socket.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """Accept no more connections. Open ones continue."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._socket.close()

    async def close(self) -> None:
        """Close all that is still open."""
        for connection in self._open.values():
            connection.abort()
        await asyncio.gather(*self._tasks)

    async def _accept(self) -> None:
        for n in itertools.count(1):
            try:
                sock, address = await asyncio.get_running_loop().sock_accept(self._socket)
            except OSError as error:
                _log.warning("cannot accept a connection", extra={"error": str(error)})
                await asyncio.sleep(_PAUSE_S)
                continue
            await self._admit(sock, address[0])
            if n % _AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _admit(self, sock: socket.socket, address: str) -> None:
        """Serve one more connection, once there is a place, or close it."""
        peer = None
        try:
            peer = await self._find_place(address)
        finally:
            if peer is None:
                sock.close()
        if peer is None:
            return
        self._open[peer] = _Connection(peer, sock, self._make_handler(), self._limits.received_bytes)
        task = asyncio.create_task(self._serve(self._open[peer]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find_place(self, address: str) -> Peer | None:
        """Wait for a place. Return None if the address has others already, of which none gives way."""
        while True:
            peer = Peer(address, asyncio.get_running_loop().time())
            if len(self._open) < self._limits.connections:
                return peer
            displaced = find_displaced(self._open, peer, self._limits.fair_s)
            if displaced is not None:
                self._open.pop(displaced).abort()
                return peer
            if any(other.address == address for other in self._open):
                return None
            self._ended.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._ended.wait()

    async def _serve(self, connection: _Connection) -> None:
        """Let a connection be served until it ends or its time is up."""
        handshake_s = None if self._tls is None else self._limits.patience_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, connection.sock, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
            async with asyncio.timeout(self._limits.patience_s):
                await connection.ended.wait()
        except OSError as error:  # a failed handshake, or no time left
            _log.debug("ended a connection", extra={"address": connection.peer.address, "error": repr(error)})
            connection.abort()
            # Otherwise it keeps the connection's buffers, 256 KiB and more, until cycles are collected.
            error.__traceback__ = None
        finally:
            self._open.pop(connection.peer, None)
            self._ended.set()
