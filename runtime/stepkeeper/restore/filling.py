"""Read the blocks of one rank, verify them, put their bytes in place, and send them to other ranks."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, Full, Queue
from typing import Final, Protocol

import numpy as np

from stepkeeper.checkpoint.blocks import BlockTable
from stepkeeper.coordination.rank_group import RankGroup, SoloRankGroup
from stepkeeper.coordination.waits import SilenceLimit, Waits
from stepkeeper.errors import NoticeDeadlineError, PeerLostError, StorageError
from stepkeeper.restore.placing import Bytes, Piece, Place, Places
from stepkeeper.restore.progress import RestoreProgress
from stepkeeper.storage.base import Buffer

__all__ = ["STREAMS", "Filling", "Peers"]

STREAMS: Final = 8
"""The number of blocks that are read at once where they are small."""

_WAITING: Final = 8
"""The number of blocks whose finished parts may wait for the thread that moves them to devices."""

_LOOK_S: Final = 0.2
"""The interval at which a waiting thread checks whether the run has ended."""

_Found = Sequence[Place]
"""Places that were filled by the same bytes."""


class Peers(Protocol):
    """The connection to the other ranks."""

    def send_block(self, rank: int, number: int, data: Bytes) -> None:
        """Send a verified block to that rank."""
        ...

    def announce_failure(self, error: BaseException) -> None:
        """Send this rank's error to the other ranks, so that none of them keeps waiting for it."""
        ...


class Blocks(Protocol):
    """The blocks of a checkpoint."""

    def read_block(self, path: str, block: int, /) -> Buffer:
        """Read the whole block, verified. Any thread calls this."""
        ...


class Filling:
    """Fill tensors and collect values, once. Any thread may call `put_bytes` from the start until `run` has ended."""

    def __init__(
        self,
        reader: Blocks,
        table: BlockTable,
        places: Places,
        *,
        progress: RestoreProgress | None = None,
        waits: Waits | None = None,
        rank_group: RankGroup | None = None,
        n_streams: int = STREAMS,
    ) -> None:
        """Prepare to fill `places` with the bytes of the blocks in `table`.

        `waits` ends the wait for the blocks if a notice's deadline comes, or a rank is lost. The ranks in `rank_group`
        fill their states together; None: this one alone. `n_streams` blocks are read at once, and held in host memory.
        """
        self._n_streams = n_streams
        self._rank_group: Final = rank_group or SoloRankGroup()
        self._waits = waits or Waits()
        self._reader = reader
        self._progress = progress or RestoreProgress("a checkpoint")
        self._done_bytes = self._moved_bytes = 0
        self._table = table
        self._places = places
        self._lock = threading.Condition()
        self._n_putting = 0
        self._found: Queue[_Found | None] = Queue(_WAITING)
        """From the reading threads to the thread of `run`; None from each thread that ends."""

        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._is_stuck = False

    def run(self, reads: Mapping[int, Sequence[int]], peers: Peers | None = None) -> None:
        """Read blocks, and return once all that is read here or put by other threads is in place.

        Raises the first error of any thread. Afterwards all of its threads have ended, unless the waits were ended
        while the store was stuck: such a thread changes nothing.

        Args:
            reads: The numbers of the blocks to read, each with the ranks that it is sent to.
            peers: The connection to these ranks.
        """
        # Each thread takes the next block from here, under the lock.
        waiting = iter(list(reads.items()))
        lacking_bytes = sum(place.n_lacking for place in self._places.all)
        self._progress.total_bytes = self._done_bytes + lacking_bytes
        threads = [
            threading.Thread(
                target=self._read_blocks, args=(waiting, peers), name=f"restore-{number}", daemon=True
            )
            for number in range(min(self._n_streams, len(reads)))
        ]
        try:
            with self._rank_group.heartbeat() as note_moved:
                for thread in threads:
                    thread.start()
                for piece in self._pieces(len(threads), note_moved, peers):
                    piece.finish()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._end(threads, peers)
        if self._failure is not None:
            raise self._failure

    def _end(self, threads: Sequence[threading.Thread], peers: Peers | None) -> None:
        """Stop placing bytes, send a failure to the other ranks, and wait for the threads."""
        self._ended.set()
        failure = self._failure
        try:
            # A stuck thread may never end, and after the deadline there is no time to wait. Then the closed connections
            # notify the other ranks.
            if not (self._is_stuck or isinstance(failure, NoticeDeadlineError)):
                if failure is not None and peers is not None:
                    self._waits.run(lambda: peers.announce_failure(failure))
                self._waits.await_threads(threads)
        finally:
            with self._lock:
                # Bytes on their way from other ranks must not get into a state that is being filled again.
                self._lock.wait_for(lambda: not self._n_putting)

    def put_bytes(self, number: int, first: int, data: Bytes) -> None:
        """Put verified bytes of a block where they belong, from byte `first` of the block on.

        Nothing is changed once `run` has ended.
        """
        with self._lock:
            if self._ended.is_set():
                return
            self._n_putting += 1
        try:
            self._put(number, first, data)
        finally:
            with self._lock:
                self._n_putting -= 1
                self._lock.notify_all()

    def _put(self, number: int, first: int, data: Bytes) -> None:
        start = self._table.blocks[number].start + first
        found: list[Place] = []
        for place in self._places.by_block.get(number, ()):
            n_bytes = place.copy_bytes(start, data)
            with self._lock:
                place.n_lacking -= n_bytes
                self._done_bytes += n_bytes
                if n_bytes and not place.n_lacking:
                    found.append(place)
        if found:
            self._hand_on(found)

    def fail(self, error: BaseException) -> None:
        """Make `run` raise this error, unless something else went wrong before."""
        with self._lock:
            self._failure = self._failure or error
        self._ended.set()

    def _pieces(
        self, n_threads: int, note_moved: Callable[[int], None], peers: Peers | None
    ) -> Iterator[Piece]:
        """Yield each piece once all its bytes have come, until all places are filled and every thread has ended."""
        n_open, noted_bytes = len(self._places.all), 0
        since_s = time.monotonic()
        silence = SilenceLimit(self._rank_group.limits.silence_s, since_s)
        while n_open or n_threads:
            try:
                found = self._found.get(timeout=_LOOK_S)
            except Empty:
                found = ()  # only look at the progress
            before, noted_bytes = noted_bytes, self._done_bytes
            note_moved(noted_bytes - before)
            self._progress.note_bytes(noted_bytes)
            if self._ended.is_set():
                return
            # In every round: blocks may come so fast that this thread never waits for one.
            self._waits.check(since_s)
            self._check_silence(silence, peers)
            if found is None:
                n_threads -= 1
                continue
            n_open -= len(found)
            yield from (place for place in found if isinstance(place, Piece))

    def _check_silence(self, silence: SilenceLimit, peers: Peers | None) -> None:
        """Check that there was progress.

        Raises:
            PeerLostError: There was none for too long, and another rank that sends or receives may be stuck.
            StorageError: There was none for too long, and no other rank is involved.
        """
        now_s = time.monotonic()
        if silence.has_moved(self._done_bytes, now_s) or not silence.is_over(now_s):
            return
        if peers is not None and self._others_have_moved():
            # The blocks for this rank may still come.
            silence.restart(now_s)
            return
        self._is_stuck = True
        what, limit_s = self._progress.what, self._rank_group.limits.silence_s
        if peers is None:
            raise StorageError(f"{what}: no bytes have come from the store for {limit_s:.0f} s")
        raise PeerLostError(
            f"{what}: no bytes have come to rank {self._rank_group.rank} for {limit_s:.0f} s: the store, or another "
            "rank of this restore, is stuck"
        )

    def _others_have_moved(self) -> bool:
        """Return True if any rank has read more since the last call: a rank may be reading blocks for itself first."""
        before, self._moved_bytes = self._moved_bytes, self._rank_group.read_moved()
        return self._moved_bytes != before

    def _hand_on(self, found: _Found | None) -> None:
        """Pass filled places to the thread of `run`, as soon as its queue has room. None: this thread ends."""
        while not self._ended.is_set():
            try:
                self._found.put(found, timeout=_LOOK_S)
            except Full:
                continue
            return

    def _read_blocks(self, waiting: Iterator[tuple[int, Sequence[int]]], peers: Peers | None) -> None:
        try:
            while not self._ended.is_set():
                with self._lock:
                    number, ranks = next(waiting, (None, ()))
                if number is None:
                    break
                block = self._table.blocks[number]
                data = np.frombuffer(self._reader.read_block(block.path, block.index), dtype=np.uint8)
                if self._ended.is_set():
                    # The connections to other ranks may be closed.
                    break
                for rank in ranks:
                    assert peers is not None
                    peers.send_block(rank, number, data)
                self.put_bytes(number, 0, data)
        except BaseException as error:  # raised by `run`, in its thread
            self.fail(error)
        self._hand_on(None)
