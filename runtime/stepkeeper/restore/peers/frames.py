"""Send and receive frames over TCP connections, and prove that both ends are ranks of the same restore."""

import hmac
import secrets
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from stepkeeper.restore.placing import Bytes
from stepkeeper.storage.crc import crc32c

__all__ = [
    "FRAME_BYTES",
    "Frame",
    "Kind",
    "connect",
    "identify_caller",
    "listen",
    "receive_frame",
    "send_frame",
]

FRAME_BYTES: Final = 1024 * 1024
"""The most bytes that one frame carries, and that a rank holds of each connection at a time."""

_HEADER: Final = struct.Struct("<BQQI")
_CRC: Final = struct.Struct("<I")
"""The checksum of the header and of the bytes that follow. Bytes in another place are as bad as other bytes."""

_GREETING: Final = struct.Struct("<4sI16s")
_MAGIC: Final = b"SKR2"
_PROOF_BYTES: Final = 32
_TAKEN: Final = b"\1"
_GREETING_TIMEOUT_S: Final = 10.0
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6))
_UNANSWERED_MILLIS: Final = 60_000
"""After this time a connection is lost if its other end takes nothing more, because its host is gone."""


class Kind(IntEnum):
    """The kinds of frames that ranks send each other."""

    BLOCK = 1
    """Bytes of a block: its number, and where in it they begin."""
    MANIFEST = 2
    """Bytes of a manifest: its place among the manifests, and its size. They come in order."""
    MANIFESTS_END = 3
    STOP = 4
    """The sender has failed, or was told of a rank that has: the rank that failed first, and a text."""
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
    if not _fill(sock, memoryview(start)):
        return None
    header = bytes(start[: _HEADER.size])
    kind, number, first, length = _HEADER.unpack(header)
    (crc,) = _CRC.unpack_from(start, _HEADER.size)
    if length > len(buffer):
        raise ConnectionError(f"a frame of {length} bytes")
    view = memoryview(buffer)[:length]
    if not _fill(sock, view):
        return None
    if crc32c(view, crc32c(header)) != crc:
        raise ConnectionError("bytes have changed on the way")
    return Frame(Kind(kind), number, first, np.frombuffer(view, dtype=np.uint8))


def listen() -> socket.socket:
    """Open a socket that takes connections from anywhere, on any free port."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError:
            # The host has IPv6, but no address.
            pass
    return socket.create_server(("", 0))


def connect(host: str, port: int, ranks: tuple[int, int], secret: bytes, timeout_s: float) -> socket.socket:
    """Connect the first of `ranks` to the second one, if that listens there. Raises OSError."""
    rank, peer = ranks
    sock = socket.create_connection((host, port), timeout_s)
    try:
        nonce = secrets.token_bytes(16)
        sock.sendall(_GREETING.pack(_MAGIC, rank, nonce))
        answer = _exactly(sock, 16 + _PROOF_BYTES)
        if not hmac.compare_digest(answer[16:], _proof(secret, b"listener", peer, nonce)):
            raise ConnectionError(f"{host}:{port} isn't rank {peer} of this restore")
        sock.sendall(_proof(secret, b"caller", rank, answer[:16]))
        _exactly(sock, 1)
        # The other end counts on this connection from here on. Before, this end may give it up and call again.
        sock.sendall(_TAKEN)
    except BaseException:
        sock.close()
        raise
    return _settled(sock)


def identify_caller(sock: socket.socket, own_rank: int, secret: bytes) -> int:
    """Find out which rank has called on this connection. Raises OSError if the caller doesn't know the secret."""
    sock.settimeout(_GREETING_TIMEOUT_S)
    magic, rank, nonce = _GREETING.unpack(_exactly(sock, _GREETING.size))
    if magic != _MAGIC:
        raise ConnectionError("the caller is no rank of a restore")
    own = secrets.token_bytes(16)
    sock.sendall(own + _proof(secret, b"listener", own_rank, nonce))
    proof = _exactly(sock, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"caller", rank, own)):
        raise ConnectionError("the caller is no rank of this restore")
    sock.sendall(_TAKEN)
    _exactly(sock, 1)
    _settled(sock)
    return int(rank)


def _proof(secret: bytes, part: bytes, rank: int, nonce: bytes) -> bytes:
    """Compute a proof, for whoever sent the nonce, to be this rank as caller or listener. It takes the secret."""
    return hmac.digest(secret, part + struct.pack("<I", rank) + nonce, "sha256")


def _settled(sock: socket.socket) -> socket.socket:
    """Set the connection to wait as long as it takes, but not for a host that is gone."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _UNANSWERED_MILLIS)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def _fill(sock: socket.socket, view: memoryview) -> bool:
    """Fill the view with what comes; False if the connection ended before."""
    while view.nbytes:
        n_bytes = sock.recv_into(view)
        if not n_bytes:
            return False
        view = view[n_bytes:]
    return True


def _exactly(sock: socket.socket, n_bytes: int) -> bytes:
    data = bytearray(n_bytes)
    if not _fill(sock, memoryview(data)):
        raise ConnectionError("the connection ended")
    return bytes(data)
