"""Send and receive frames over the TCP connections of a restore."""

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from stepkeeper.links.handshake import fill
from stepkeeper.restore.placing import Bytes
from stepkeeper.storage.crc import crc32c

__all__ = ["FRAME_BYTES", "Frame", "Kind", "receive_frame", "send_frame"]

FRAME_BYTES: Final = 1024 * 1024
"""The most bytes that one frame carries, and that a rank holds of each connection at a time."""

_HEADER: Final = struct.Struct("<BQQI")
_CRC: Final = struct.Struct("<I")
"""The checksum of the header and of the bytes that follow. Right bytes in the wrong place are bad, too."""


class Kind(IntEnum):
    """The kinds of frames that ranks send each other."""

    BLOCK = 1
    """Bytes of a block: its number, and where in it they begin."""
    MANIFEST = 2
    """Bytes of a manifest: its place among the manifests, and its size. They come in order."""
    MANIFESTS_END = 3
    STOP = 4
    """The sender has failed, or knows of a rank that has: the rank that failed first, and a text."""
    BYE = 5
    """The sender has nothing more to send."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    number: int
    first: int
    data: Bytes
    """Valid until the next frame is received."""


def send_frame(
    sock: socket.socket, kind: Kind, number: int = 0, first: int = 0, data: memoryview | bytes = b""
) -> None:
    """Send a frame. Raises OSError."""
    view = memoryview(data)
    header = _HEADER.pack(kind, number, first, view.nbytes)
    sock.sendall(header + _CRC.pack(crc32c(view, crc32c(header))))
    if view.nbytes:
        sock.sendall(view)


def receive_frame(sock: socket.socket, buffer: bytearray) -> Frame | None:
    """Receive the next frame, with its bytes in `buffer`; None if the connection has ended. Raises OSError."""
    start = bytearray(_HEADER.size + _CRC.size)
    if not fill(sock, memoryview(start)):
        return None
    header = bytes(start[: _HEADER.size])
    kind, number, first, length = _HEADER.unpack(header)
    (crc,) = _CRC.unpack_from(start, _HEADER.size)
    if length > len(buffer):
        raise ConnectionError(f"a frame of {length} bytes is longer than {len(buffer)}")
    view = memoryview(buffer)[:length]
    if not fill(sock, view):
        return None
    if crc32c(view, crc32c(header)) != crc:
        raise ConnectionError("bytes were changed in transit")
    return Frame(Kind(kind), number, first, np.frombuffer(view, dtype=np.uint8))
