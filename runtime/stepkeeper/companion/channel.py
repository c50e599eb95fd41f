"""Send messages between the trainer and its companion: one packet each, with optional file descriptors."""

import array
import contextlib
import json
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from stepkeeper.fork_guard import MemoryFile

__all__ = ["Channel", "Outbox", "Packet", "Peer"]

_INLINE_LIMIT_BYTES: Final = 32 * 1024
"""A longer body is sent in a memfd, because a packet has to fit into the socket's buffer."""

_MAX_FDS: Final = 4
"""The most file descriptors of a packet, with that of a long body."""

_LOOK_AGAIN_MILLIS: Final = 500
"""Milliseconds between checks of a peer that has no descriptor for its end."""

_INLINE: Final = b"i"
_IN_MEMFD: Final = b"m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """A received message with its file descriptors."""

    message: dict[str, Any]
    fds: tuple[int, ...] = ()
    """Open file descriptors, which the receiver has to close."""


class Peer(Protocol):
    """The process at the other end."""

    @property
    def end_fd(self) -> int | None:
        """Descriptor that is readable once the process has ended; None if there is none."""

    def has_ended(self) -> bool:
        """Return whether the process has ended."""


class Channel:
    """Send and receive packets at one end of a pair of sockets. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(
        self, message: dict[str, Any], fds: Sequence[int] = (), *, timeout_s: float | None = None
    ) -> None:
        """Send `message`, a JSON object, and open file descriptors, which stay open here.

        Raises TimeoutError if there is no room in the socket's buffer for `timeout_s` seconds, OSError if the
        other end is closed.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) <= _INLINE_LIMIT_BYTES:
            self._send([_INLINE, body], fds, timeout_s)
            return
        memory = MemoryFile("stepkeeper-message")
        try:
            with open(memory.fd, "wb", closefd=False) as file:
                file.write(body)
            self._send([_IN_MEMFD], [*fds, memory.fd], timeout_s)
        finally:
            memory.close()

    def _send(self, parts: Sequence[bytes], fds: Sequence[int], timeout_s: float | None) -> None:
        # socket.send_fds ignores its flags, and a timeout of the socket would also end the receiving thread's waits.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        if timeout_s is None:
            self._socket.sendmsg(parts, rights)
            return
        ends_s = time.monotonic() + timeout_s
        while True:
            try:
                self._socket.sendmsg(parts, rights, socket.MSG_DONTWAIT)
            except BlockingIOError as error:
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    text = f"the other end of the channel received nothing for {timeout_s} s"
                    raise TimeoutError(text) from error
                room = select.poll()
                room.register(self._socket, select.POLLOUT)
                room.poll(left_s * 1000)
            else:
                return

    def receive(self, peer: Peer | None = None) -> Packet | None:
        """Wait for the next message. Return None once the other end is closed, or `peer` has ended.

        Other processes may hold copies of the peer's socket, so that it stays open after the peer's end.
        """
        if peer is not None and not self._await_packet(peer):
            return None
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _INLINE_LIMIT_BYTES + 1, _MAX_FDS)
        except ConnectionResetError:  # the other end was closed with unread packets
            return None
        if not data:
            return None
        if data[:1] == _INLINE:
            return Packet(message=json.loads(data[1:]), fds=tuple(fds))
        *fds, body_fd = fds  # the sender appends the body's descriptor
        try:
            with mmap.mmap(body_fd, 0, access=mmap.ACCESS_READ) as body:
                return Packet(message=json.loads(body[:]), fds=tuple(fds))
        finally:
            os.close(body_fd)

    def _await_packet(self, peer: Peer) -> bool:
        """Wait until there is something to receive. Return False if the peer has ended without a further message."""
        ours, its_end = self._socket.fileno(), peer.end_fd
        watched = select.poll()
        watched.register(ours, select.POLLIN)
        if its_end is not None:
            watched.register(its_end, select.POLLIN)
        while True:
            ready = {fd for fd, _ in watched.poll(_LOOK_AGAIN_MILLIS if its_end is None else None)}
            if ours in ready:
                return True
            if its_end in ready or peer.has_ended():
                # It may have sent its last message between the two checks.
                return ours in {fd for fd, _ in watched.poll(0)}

    def shut_down(self) -> None:
        """Shut the connection down at both ends: a thread that waits in `receive` gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. No other thread may be using it: call `shut_down` first."""
        self._socket.close()


@final
class Outbox:
    """Send messages without waiting for the trainer. Any thread may send.

    The socket of a trainer that hangs fills up. Reports must continue then: they show the hang to the operator.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._kept: deque[dict[str, Any]] = deque()
        """Messages that found no room, oldest first. While there are some, a thread sends them."""

    def offer(self, message: dict[str, Any]) -> None:
        """Send a message, or drop it if the trainer isn't receiving."""
        with contextlib.suppress(OSError):
            self._channel.send(message, timeout_s=0.0)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or keep it until the trainer receives again.

        A trainer that hangs makes no requests, so only the few messages that follow from its last requests are kept.
        """
        with self._lock:
            if self._kept:
                self._kept.append(message)
                return
            try:
                self._channel.send(message, timeout_s=0.0)
            except TimeoutError:
                self._kept.append(message)
                threading.Thread(target=self._send_kept, name="outbox", daemon=True).start()
            except OSError:
                # The trainer is gone. This process ends as soon as the receiving thread notices.
                return

    def _send_kept(self) -> None:
        """Send the kept messages in order, however long the trainer takes."""
        while True:
            with contextlib.suppress(OSError):  # as above
                self._channel.send(self._kept[0])
            with self._lock:
                self._kept.popleft()
                if not self._kept:
                    return
