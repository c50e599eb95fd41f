"""Messages between the trainer and its companion: one packet each, with file descriptors where they are needed."""

import array
import contextlib
import json
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Channel", "Packet"]

_INLINE_LIMIT_BYTES: Final = 32 * 1024
"""A longer body travels in a memfd: a packet has to fit a socket's buffer whole."""

_MAX_FDS: Final = 4
_INLINE: Final = b"i"
_IN_MEMFD: Final = b"m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    message: dict[str, Any]
    fds: tuple[int, ...] = ()
    """Open file descriptors, which the receiver has to close."""


class Channel:
    """One end of a pair of packet sockets. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: dict[str, Any], fds: Sequence[int] = (), *, wait: bool = True) -> None:
        """The other end will receive `message` whole.

        Raises:
            BlockingIOError: the other end is behind with receiving, and `wait` is False.
            OSError: there is no other end any more.

        """
        body = json.dumps(message, separators=(",", ":")).encode()
        flags = 0 if wait else socket.MSG_DONTWAIT
        if len(body) <= _INLINE_LIMIT_BYTES:
            self._send([_INLINE, body], fds, flags)
            return
        fd = os.memfd_create("stepkeeper-message")
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(body)
            self._send([_IN_MEMFD], [*fds, fd], flags)
        finally:
            os.close(fd)

    def _send(self, parts: Sequence[bytes], fds: Sequence[int], flags: int) -> None:
        # socket.send_fds takes flags and leaves them out.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg(parts, rights, flags)

    def receive(self) -> Packet | None:
        """The next message, or None once the other end is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _INLINE_LIMIT_BYTES + 1, _MAX_FDS)
        except ConnectionResetError:
            return None
        if not data:
            return None
        if data[:1] == _INLINE:
            return Packet(message=json.loads(data[1:]), fds=tuple(fds))
        *fds, body_fd = fds
        try:
            with mmap.mmap(body_fd, 0, access=mmap.ACCESS_READ) as body:
                return Packet(message=json.loads(body[:]), fds=tuple(fds))
        finally:
            os.close(body_fd)

    def hang_up(self) -> None:
        """Both ends receive nothing more: who waits in `receive` gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The socket is given back. No other thread may be using it: `hang_up` comes first."""
        self._socket.close()
