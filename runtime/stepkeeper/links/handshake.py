"""Open TCP connections between ranks, and prove that both ends are ranks of the same training.

The proof is a keyed hash: each end sends a nonce, and gets it back hashed with the secret that all ranks have. The
caller sends its greeting, and then `connect` and `identify_caller` alternate until both have sent one last byte.
"""

import hmac
import secrets
import socket
import struct
from contextlib import suppress
from typing import Final

__all__ = ["connect", "fill", "identify_caller", "listen"]

_GREETING: Final = struct.Struct("<4sI16s")
"""A caller's first message: `_MAGIC`, its rank, and its nonce."""

_MAGIC: Final = b"SKR2"
_NONCE_BYTES: Final = 16
_PROOF_BYTES: Final = 32
_TAKEN: Final = b"\1"
_GREETING_TIMEOUT_S: Final = 10.0
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6))
_UNANSWERED_MILLIS: Final = 60_000
"""The time after which a connection is lost if its other end acknowledges nothing, since its host is gone."""


def listen() -> socket.socket:
    """Open a socket that accepts connections on all addresses, on any free port."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # the host has IPv6, but no address
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def connect(host: str, port: int, ranks: tuple[int, int], secret: bytes, timeout_s: float) -> socket.socket:
    """Connect the first of `ranks` to the second, which must listen there. Raises OSError."""
    rank, peer = ranks
    sock = socket.create_connection((host, port), timeout_s)
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(_GREETING.pack(_MAGIC, rank, nonce))
        peers_nonce, proof = _exactly(sock, _NONCE_BYTES), _exactly(sock, _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b"listener", peer, nonce)):
            raise ConnectionError(f"{host}:{port} is not rank {peer} of this training")
        sock.sendall(_proof(secret, b"caller", rank, peers_nonce))
        _exactly(sock, 1)
        # From here on the other end relies on this connection. Before, this end may drop it and connect again.
        sock.sendall(_TAKEN)
    except BaseException:
        sock.close()
        raise
    return _settled(sock)


def identify_caller(sock: socket.socket, own_rank: int, secret: bytes) -> int:
    """Find out which rank made this connection. Raises OSError if the caller doesn't know the secret."""
    sock.settimeout(_GREETING_TIMEOUT_S)
    magic, rank, nonce = _GREETING.unpack(_exactly(sock, _GREETING.size))
    if magic != _MAGIC:
        raise ConnectionError("the caller is not a rank of a training")
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(own_nonce + _proof(secret, b"listener", own_rank, nonce))
    proof = _exactly(sock, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"caller", rank, own_nonce)):
        raise ConnectionError("the caller is not a rank of this training")
    sock.sendall(_TAKEN)
    _exactly(sock, 1)
    _settled(sock)
    return int(rank)


def _proof(secret: bytes, part: bytes, rank: int, nonce: bytes) -> bytes:
    """Compute the proof, for the nonce's sender, of being this rank as caller or listener. It needs the secret."""
    return hmac.digest(secret, part + struct.pack("<I", rank) + nonce, "sha256")


def _settled(sock: socket.socket) -> socket.socket:
    """Configure the connection to wait without limit, but to detect a lost host."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _UNANSWERED_MILLIS)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def fill(sock: socket.socket, view: memoryview) -> bool:
    """Fill the view with received data. Return False if the connection ended before."""
    while view.nbytes:
        n_bytes = sock.recv_into(view)
        if not n_bytes:
            return False
        view = view[n_bytes:]
    return True


def _exactly(sock: socket.socket, n_bytes: int) -> bytes:
    data = bytearray(n_bytes)
    if not fill(sock, memoryview(data)):
        raise ConnectionError("the connection ended")
    return bytes(data)
