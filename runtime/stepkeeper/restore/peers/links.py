"""Connections between the ranks of a restore: what one has read goes to the others, and who is lost is noticed."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stepkeeper.errors import PeerLostError
from stepkeeper.restore.peers.frames import FRAME_BYTES, Frame, Kind, receive_frame, send_frame
from stepkeeper.restore.peers.joining import Joining, shut
from stepkeeper.restore.placing import Bytes

__all__ = ["Links", "PeerStoppedError"]

_CALLED_TIMEOUT_S: Final = 30.0
"""For a call that was answered to be noted."""

_LISTENED_S: Final = 5.0


class PeerStoppedError(PeerLostError):
    """Another rank has failed, and says itself why."""


@dataclass(slots=True)
class _Link:
    rank: int
    sock: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a frame is sent."""

    bye: bool = False
    """One of the two ends has said that it leaves."""


class Links:
    """Of one rank to others, for one restore. All ranks make theirs, tell where they are, `call` and `meet`.

    `on_lost` is told who is gone, and why that seems so; what it returns is raised.
    """

    def __init__(self, rank: int, on_lost: Callable[[int, str], Exception]) -> None:
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
        return self._joining.port

    def start(self, secret: bytes, relayed_to: Collection[int]) -> None:
        """Those who know the secret may call. Manifests that come are passed on to those ranks."""
        self._relayed_to = relayed_to
        self._joining.start(secret)

    def connect_to(self, peers: Collection[int], addresses: Sequence[Mapping[str, Any]]) -> None:
        """There is a connection to those of these ranks that are before this one; the others call.

        `addresses` are those of all, by rank. Raises OSError if there is no way.
        """
        for peer in sorted(peers):
            if peer < self._rank and peer not in self._links:
                self._join(peer, self._joining.connect(peer, addresses[peer]))

    def await_peers(self, peers: Collection[int]) -> None:
        """There is a connection to each of these ranks: all of them have called. Raises PeerLostError."""
        deadline = time.monotonic() + _CALLED_TIMEOUT_S
        with self._changed:
            while lacking := set(peers) - set(self._links):
                self._check()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise PeerLostError(f"rank {min(lacking)} says that it has called rank {self._rank}")

    def deliver_to(self, put: Callable[[int, int, Bytes], None], fail: Callable[[Exception], None]) -> None:
        """From now on bytes of blocks that come are `put`, and it is told if a rank fails or is lost."""
        with self._changed:
            self._take, self._fail = put, fail
            if self._failure is not None:
                fail(self._failure)

    def send_block(self, rank: int, number: int, data: Bytes) -> None:
        """The block is on its way to that rank. Raises PeerLostError if that is lost."""
        view = memoryview(data)  # type: ignore[arg-type]  # an array is a buffer
        for first in range(0, view.nbytes, FRAME_BYTES):
            self._send(self._links[rank], Kind.BLOCK, number, first, view[first : first + FRAME_BYTES])

    def send_manifests(self, manifests: Sequence[bytes]) -> None:
        """They are on their way to all other ranks, from one to the next."""
        for rank in self._relayed_to:
            for number, data in enumerate(manifests):
                for first in range(0, len(data), FRAME_BYTES):
                    piece = memoryview(data)[first : first + FRAME_BYTES]
                    self._send(self._links[rank], Kind.MANIFEST, number, len(data), piece)
            self._send(self._links[rank], Kind.MANIFESTS_END)

    def receive_manifests(self, timeout_s: float) -> list[bytes]:
        """What rank 0 has sent. Raises PeerLostError."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._manifests is None:
                self._check()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise PeerLostError(f"rank {self._rank} waited {timeout_s:.0f} s for the manifests")
            return self._manifests

    def announce_failure(self, error: BaseException) -> None:
        """Those that are connected know that this rank has failed: none of them waits for it."""
        said = json.dumps({"rank": self._rank, "text": str(error)[:1000]}).encode()
        for link in list(self._links.values()):
            try:
                self._send(link, Kind.STOP, data=said)
            except PeerLostError:
                # That one needs no telling.
                continue

    def close(self, *, announced: bool = True) -> None:
        """No connection is used any more. Unless it was `said` to all that this rank is done, it is lost to them."""
        self._left = True
        self._joining.close()
        for link in list(self._links.values()):
            link.bye = True
            if not announced:
                shut(link.sock, socket.SHUT_RDWR)
                continue
            try:
                with link.lock:
                    send_frame(link.sock, Kind.BYE)
            except OSError:
                continue
            # What the other end still sends is read to its end: a connection that is closed before takes with it what
            # has not arrived there yet.
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
        """Until the other end has left, or is lost."""
        why = "its connection ended"
        try:
            buffer = bytearray(FRAME_BYTES)
            while (frame := receive_frame(link.sock, buffer)) is not None:
                self._handle(link, frame)
        except Exception as error:  # whatever it is, nothing is heard of that rank any more
            why = str(error)
        finally:
            link.sock.close()
        if not link.bye and not self._left:
            self._note_failure(self._on_lost(link.rank, why))

    def _handle(self, link: _Link, frame: Frame) -> None:
        """The frame was dealt with. What is wrong on this side doesn't keep the other end from sending on."""
        try:
            self._dispatch(link, frame)
        except Exception as error:  # raised where the restore runs
            self._note_failure(error)

    def _dispatch(self, link: _Link, frame: Frame) -> None:
        if frame.kind is Kind.BYE:
            link.bye = True
        elif frame.kind is Kind.STOP:
            self._relay_stop(frame)
            said = json.loads(frame.data.tobytes())
            self._note_failure(PeerStoppedError(f"rank {said['rank']}: {said['text']}"))
        elif frame.kind is Kind.BLOCK:
            if self._take is not None:
                self._take(frame.number, frame.first, frame.data)
        else:
            self._take_manifest(frame)

    def _relay_stop(self, frame: Frame) -> None:
        """Those who wait for manifests through this rank know too: they have no connection to who has failed."""
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
            # Whether the other end is lost, or said before why it would go, the thread knows that listens to it.
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
