"""Hold one rank's connections to others during a restore: send its blocks, receive others, and detect lost ranks."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import PeerLostError
from stepkeeper.links.joining import Joining, shut
from stepkeeper.restore.peers.frames import FRAME_BYTES, Frame, Kind, receive_frame, send_frame
from stepkeeper.restore.placing import Bytes

__all__ = ["Links", "PeerStoppedError"]

_CALLED_TIMEOUT_S: Final = 30.0
"""The time in which a connection that a peer has made must be accepted here."""

_LISTENED_S: Final = 5.0
"""How long a failed send waits for the other end's own reason, which may be on its way."""

_LOOK_S: Final = 0.2


class PeerStoppedError(PeerLostError):
    """Another rank has failed, and has sent its error itself."""


@dataclass(slots=True)
class _Link:
    rank: int
    sock: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a frame is sent."""

    bye: bool = False
    """One of the two ends has announced that it leaves."""


class Links:
    """Connect one rank to others for one restore.

    All ranks make their Links, exchange their addresses, call `connect_to`, and then `await_peers`.
    """

    def __init__(
        self, rank: int, on_lost: Callable[[int, str], Exception], waits: Waits | None = None
    ) -> None:
        """Listen for other ranks.

        `on_lost` makes the error to raise for a rank that is gone, and why it seems so.
        """
        self._waits = waits or Waits()
        self._rank = rank
        self._on_lost = on_lost
        self._joining = Joining(rank, self._join)
        self._links: dict[int, _Link] = {}
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._left = False
        self._relayed_to: Collection[int] = ()
        self._incoming: list[bytearray] = []
        self._manifests: list[bytes] | None = None
        self._take: Callable[[int, int, Bytes], None] | None = None
        self._fail: Callable[[Exception], None] | None = None

    @property
    def port(self) -> int:
        """The port on which this rank listens."""
        return self._joining.port

    def start(self, secret: bytes, relayed_to: Collection[int]) -> None:
        """Let ranks that know the secret call. Manifests that come are passed on to `relayed_to`."""
        self._relayed_to = relayed_to
        self._joining.start(secret)

    def connect_to(self, peers: Collection[int], addresses: Sequence[Mapping[str, Any]]) -> None:
        """Connect to those of `peers` that have lower ranks than this one; the others call.

        Raises OSError if no connection is possible, or the error that ends all waits.
        """
        for peer in sorted(peers):
            if peer < self._rank and peer not in self._links:
                # A stuck process accepts the connection, and sends nothing.
                sock = self._waits.run(partial(self._joining.connect, peer, addresses[peer]))
                self._join(peer, sock)

    def await_peers(self, peers: Collection[int]) -> None:
        """Wait until there is a connection to each of these ranks; all of them have called. Raises PeerLostError."""
        if not self._await(lambda: not set(peers) - set(self._links), _CALLED_TIMEOUT_S):
            lacking = min(set(peers) - set(self._links))
            raise PeerLostError(
                f"rank {lacking} has connected to rank {self._rank}, but the connection didn't arrive"
            )

    def _await(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is there; False if it isn't in time. Raises the failure, or what ends all waits."""
        since_s = time.monotonic()
        while True:
            with self._changed:
                left_s = since_s + timeout_s - time.monotonic()
                if self._changed.wait_for(
                    lambda: is_there() or self._failure is not None, max(0.0, min(_LOOK_S, left_s))
                ):
                    # What is there counts even after a failure.
                    if not is_there():
                        self._check()
                    return True
            if left_s <= _LOOK_S:
                return False
            self._waits.check(since_s)

    def deliver_to(self, put: Callable[[int, int, Bytes], None], fail: Callable[[Exception], None]) -> None:
        """Deliver bytes of blocks that come from now on to `put`, and call `fail` if a rank fails or is lost."""
        with self._changed:
            self._take, self._fail = put, fail
            if self._failure is not None:
                fail(self._failure)

    def send_block(self, rank: int, number: int, data: Bytes) -> None:
        """Send a block to that rank. Raises PeerLostError if that is lost."""
        view = memoryview(data)  # type: ignore[arg-type]  # an array is a buffer
        for first in range(0, view.nbytes, FRAME_BYTES):
            self._send(self._links[rank], Kind.BLOCK, number, first, view[first : first + FRAME_BYTES])

    def send_manifests(self, manifests: Sequence[bytes]) -> None:
        """Send manifests on their way to all other ranks, from one to the next."""
        for rank in self._relayed_to:
            for number, data in enumerate(manifests):
                for first in range(0, len(data), FRAME_BYTES):
                    piece = memoryview(data)[first : first + FRAME_BYTES]
                    self._send(self._links[rank], Kind.MANIFEST, number, len(data), piece)
            self._send(self._links[rank], Kind.MANIFESTS_END)

    def receive_manifests(self, timeout_s: float) -> list[bytes]:
        """Wait for the manifests that rank 0 has sent. Raises PeerLostError."""
        if not self._await(lambda: self._manifests is not None, timeout_s):
            raise PeerLostError(f"rank {self._rank} received no manifests within {timeout_s:.0f} s")
        assert self._manifests is not None
        return self._manifests

    def announce_failure(self, error: BaseException) -> None:
        """Send this rank's failure to the connected ranks, so that none of them waits for it."""
        message = json.dumps({"rank": self._rank, "text": str(error)[:1000]}).encode()
        for link in list(self._links.values()):
            try:
                self._send(link, Kind.STOP, data=message)
            except PeerLostError:
                # That rank is lost: it needs no message.
                continue

    def close(self, *, announced: bool = True) -> None:
        """Stop using the connections.

        The others treat this rank as lost unless its end was `announced` to them all.
        """
        self._left = True
        self._joining.close()
        for link in list(self._links.values()):
            link.bye = True
            if not announced:
                # Without a frame before, the end of the connection shows the other end that this rank is lost.
                shut(link.sock, socket.SHUT_RDWR)
                continue
            try:
                with link.lock:
                    send_frame(link.sock, Kind.BYE)
            except OSError:
                continue
            # The receiving thread reads the other end's remaining frames. Closing the connection before that would
            # discard what has not arrived there yet.
            shut(link.sock, socket.SHUT_WR)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _join(self, rank: int, sock: socket.socket) -> None:
        link = _Link(rank, sock)
        with self._changed:
            self._links[rank] = link
            self._changed.notify_all()
        threading.Thread(target=self._receive, args=(link,), name=f"restore-from-{rank}", daemon=True).start()

    def _receive(self, link: _Link) -> None:
        """Handle the other end's frames, until it has left or is lost."""
        why = "its connection ended"
        try:
            buffer = bytearray(FRAME_BYTES)
            while (frame := receive_frame(link.sock, buffer)) is not None:
                self._handle(link, frame)
        except Exception as error:  # whatever the error, nothing more comes from that rank
            why = str(error)
        finally:
            link.sock.close()
        if not link.bye and not self._left:
            self._note_failure(self._on_lost(link.rank, why))

    def _handle(self, link: _Link, frame: Frame) -> None:
        """Handle a frame. An error on this side doesn't stop the other end from sending."""
        try:
            self._dispatch(link, frame)
        except Exception as error:  # raised where the restore runs
            self._note_failure(error)

    def _dispatch(self, link: _Link, frame: Frame) -> None:
        if frame.kind is Kind.BYE:
            link.bye = True
        elif frame.kind is Kind.STOP:
            self._relay_stop(frame)
            message = json.loads(frame.data.tobytes())
            self._note_failure(PeerStoppedError(f"rank {message['rank']}: {message['text']}"))
        elif frame.kind is Kind.BLOCK:
            if self._take is not None:  # no rank sends blocks before `deliver_to`
                self._take(frame.number, frame.first, frame.data)
        else:
            self._take_manifest(frame)

    def _relay_stop(self, frame: Frame) -> None:
        """Pass the failure on to the ranks that are connected with the failed one through this one only."""
        for rank in self._relayed_to:
            link = self._links.get(rank)
            if link is not None:
                with contextlib.suppress(PeerLostError):
                    self._send(link, Kind.STOP, data=frame.data.tobytes())

    def _take_manifest(self, frame: Frame) -> None:
        for rank in self._relayed_to:
            self._send(self._links[rank], frame.kind, frame.number, frame.first, frame.data.data)
        if frame.kind is Kind.MANIFEST:
            if frame.number == len(self._incoming):
                self._incoming.append(bytearray())
            self._incoming[-1] += frame.data.data
            return
        with self._changed:
            self._manifests = [bytes(each) for each in self._incoming]
            self._changed.notify_all()

    def _send(
        self, link: _Link, kind: Kind, number: int = 0, first: int = 0, data: memoryview | bytes = b""
    ) -> None:
        try:
            with link.lock:
                send_frame(link.sock, kind, number, first, data)
        except OSError as error:
            # The thread that receives from the other end knows whether that is lost or has sent why it leaves.
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, _LISTENED_S)
                self._check()
            raise self._on_lost(link.rank, str(error)) from error

    def _note_failure(self, error: Exception) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()
            fail = self._fail
        if fail is not None:
            fail(error)
