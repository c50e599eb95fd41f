"""Read the blocks of one rank, verify them, put their bytes in place, and send them to other ranks."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add
from queue import Empty, Full, Queue
from typing import Final, Protocol, runtime_checkable

import numpy as np

from stepkeeper.checkpoint.blocks import Block, BlockTable
from stepkeeper.coordination.rank_group import RankGroup, SoloRankGroup
from stepkeeper.coordination.waits import SilenceLimit, Waits
from stepkeeper.errors import NoticeDeadlineError, PeerLostError, StorageError
from stepkeeper.restore.placing import Bytes, Piece, Place, Places
from stepkeeper.restore.progress import RestoreProgress
from stepkeeper.storage.base import Buffer

__all__ = ["STREAMS", "Blocks", "Filling", "Peers", "StreamedBlocks"]

STREAMS: Final = 8
"""The most blocks that are read at once where they are small."""

_WAITED_S: Final = 0.01
"""The time without CPU from which a block counts as waiting for the store: more reads at once are faster then."""

_FEW_PLACES: Final = 16
"""The most places of a block that is put in place piece by piece: each place looks at each piece."""

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


@runtime_checkable
class StreamedBlocks(Blocks, Protocol):
    """Blocks of which some can be read in pieces."""

    def stream_block(self, path: str, block: int, put: Callable[[int, bytes], None], /) -> bool:
        """Call `put` for each piece. Return whether they were right; see `BlockReader`. Any thread calls this."""
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
        self._waiting: Iterator[tuple[int, Sequence[int]]] = iter(())
        """The blocks that no thread has begun to read; each takes the next one, under the lock."""

        self._threads: list[threading.Thread] = []
        self._n_running = 0
        """The number of threads whose None `_pieces` hasn't got yet."""

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
        self._waiting = iter(list(reads.items()))
        self._n_streams = min(self._n_streams, len(reads))
        lacking_bytes = sum(place.n_lacking for place in self._places.all)
        self._progress.total_bytes = self._done_bytes + lacking_bytes
        try:
            with self._rank_group.heartbeat() as note_moved:
                # Blocks in the page cache come no faster to more threads than there are cores, of two CPUs each.
                self._start_threads((1 + len(os.sched_getaffinity(0))) // 2, peers)
                for piece in self._pieces(note_moved, peers):
                    piece.finish()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._end(peers)
        if self._failure is not None:
            raise self._failure

    def _start_threads(self, n_threads: int, peers: Peers | None) -> None:
        """Start reading threads until there are `n_threads`, but no more than may read at once."""
        with self._lock:
            while len(self._threads) < min(n_threads, self._n_streams) and not self._ended.is_set():
                name = f"restore-{len(self._threads)}"
                thread = threading.Thread(target=self._read_blocks, args=(peers,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # this process may have no more threads
                    if not self._threads:
                        raise
                    self._n_streams = len(self._threads)
                    return
                self._threads.append(thread)
                self._n_running += 1

    def _end(self, peers: Peers | None) -> None:
        """Stop placing bytes, send a failure to the other ranks, and wait for the threads."""
        with self._lock:
            self._ended.set()
        failure = self._failure
        try:
            # A stuck thread may never end, and after the deadline there is no time to wait. Then the closed connections
            # notify the other ranks.
            if not (self._is_stuck or isinstance(failure, NoticeDeadlineError)):
                if failure is not None and peers is not None:
                    self._waits.run(lambda: peers.announce_failure(failure))
                self._waits.await_threads(self._threads)
        finally:
            with self._lock:
                # Bytes on their way from other ranks must not get into a state that is being filled again.
                self._lock.wait_for(lambda: not self._n_putting)

    def put_bytes(self, number: int, first: int, data: Bytes) -> None:
        """Put verified bytes of a block where they belong, from byte `first` of the block on.

        Nothing is changed once `run` has ended.
        """
        places = self._places.by_block.get(number, ())
        n_bytes = self._copy(places, self._table.blocks[number].start + first, data)
        self._count(places, n_bytes)

    def _copy(self, places: Sequence[Place], start: int, data: Bytes) -> list[int]:
        """Copy bytes of an object into these places, and return how many each got: none once `run` has ended."""
        with self._lock:
            if self._ended.is_set():
                return [0] * len(places)
            self._n_putting += 1
        try:
            return [place.copy_bytes(start, data) for place in places]
        finally:
            with self._lock:
                self._n_putting -= 1
                self._lock.notify_all()

    def _count(self, places: Sequence[Place], n_bytes: Sequence[int]) -> None:
        """Count verified bytes that these places have got."""
        found: list[Place] = []
        with self._lock:
            for place, n in zip(places, n_bytes, strict=True):
                place.n_lacking -= n
                self._done_bytes += n
                if n and not place.n_lacking:
                    found.append(place)
        if found:
            self._hand_on(found)

    def fail(self, error: BaseException) -> None:
        """Make `run` raise this error, unless something else went wrong before."""
        with self._lock:
            self._failure = self._failure or error
        self._ended.set()

    def _pieces(self, note_moved: Callable[[int], None], peers: Peers | None) -> Iterator[Piece]:
        """Yield each piece once all its bytes have come, until all places are filled and every thread has ended."""
        n_open, noted_bytes = len(self._places.all), 0
        since_s = time.monotonic()
        silence = SilenceLimit(self._rank_group.limits.silence_s, since_s)
        while n_open or self._n_running:
            try:
                found = self._found.get(timeout=_LOOK_S)
            except Empty:
                found = ()  # only look at the progress
                self._start_threads(self._n_streams, peers)  # the first reads may take very long
            before, noted_bytes = noted_bytes, self._done_bytes
            note_moved(noted_bytes - before)
            self._progress.note_bytes(noted_bytes)
            if self._ended.is_set():
                return
            # In every round: blocks may come so fast that this thread never waits for one.
            self._waits.check(since_s)
            self._check_silence(silence, peers)
            if found is None:
                with self._lock:
                    self._n_running -= 1
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

    def _stream_block(self, block: Block) -> bool:
        """Put a block in place while it is read, and count its bytes once they are verified.

        Return False if it has to be read as a whole: also if it was bad. Then all its bytes are put once more.
        """
        places = self._places.by_block.get(block.number, ())
        if not isinstance(self._reader, StreamedBlocks) or len(places) > _FEW_PLACES:
            return False
        n_bytes = [0] * len(places)

        def put(first: int, piece: bytes) -> None:
            copied = self._copy(places, block.start + first, np.frombuffer(piece, dtype=np.uint8))
            n_bytes[:] = map(add, n_bytes, copied)

        is_right = self._reader.stream_block(block.path, block.index, put)
        if is_right and not self._ended.is_set():
            self._count(places, n_bytes)
        return is_right

    def _fetch_block(self, number: int, ranks: Sequence[int], peers: Peers | None) -> None:
        """Read a block, put it in place, and send it to these ranks."""
        block = self._table.blocks[number]
        if not ranks and self._stream_block(block):
            return
        data = np.frombuffer(self._reader.read_block(block.path, block.index), dtype=np.uint8)
        if self._ended.is_set():
            # The connections to other ranks may be closed.
            return
        for rank in ranks:
            assert peers is not None
            peers.send_block(rank, number, data)
        self.put_bytes(number, 0, data)

    def _read_blocks(self, peers: Peers | None) -> None:
        try:
            while not self._ended.is_set():
                with self._lock:
                    number, ranks = next(self._waiting, (None, ()))
                if number is None:
                    break
                began_s, began_cpu_s = time.monotonic(), time.thread_time()
                self._fetch_block(number, ranks, peers)
                if time.monotonic() - began_s - (time.thread_time() - began_cpu_s) > _WAITED_S:
                    self._start_threads(self._n_streams, peers)
        except BaseException as error:  # raised by `run`, in its thread
            self.fail(error)
        self._hand_on(None)
