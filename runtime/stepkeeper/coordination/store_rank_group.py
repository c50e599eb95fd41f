"""Exchange values among several processes over their process group's store, never over a device.

A rank in a save or a restore sends heartbeats: it counts up a number in the store. Ranks that wait for it read the
number, and give the rank up if it hangs.
"""

import hashlib
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from stepkeeper.coordination.peer_watch import PeerWatch
from stepkeeper.coordination.store_callers import StoreCallers
from stepkeeper.coordination.waits import SilenceLimit, Waits
from stepkeeper.errors import PeerLostError, StepkeeperError
from stepkeeper.time_limits import GROUP_TIMEOUT_S, TimeLimits
from stepkeeper_planners.geometry.layout import ranks_in_group

__all__ = ["StoreRankGroup"]

T = TypeVar("T")
_PREFIX: Final = "stepkeeper"
_SHORTEST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.05
_LOOK_S: Final = 0.5
"""The interval at which a waiting rank checks for lost ranks."""

_MOVED: Final = "moved"
"""A name in the store: the count of bytes that saves and restores have moved on all ranks."""

_BEATS: Final = "beats"
"""Names: the count of heartbeats of each rank in a save or a restore; 0 for other ranks."""

_BEAT_EVERY_S: Final = 1.0
_ADDRESS_S: Final = 300.0
"""The time in which a started rank publishes its address."""

_READERS: Final = "#readers"
"""A suffix of names: the count of ranks that have read the broadcast of that name."""

_REMEMBERED: Final = 8
"""The number of broadcasts that may be unread at once: each of a rank's threads waits for one at most."""

_instances: Final[Counter[str]] = Counter()
"""The number of rank groups that this process has made, by members. It separates their names in the store.

The ranks of a group make their groups in the same order. Other ranks needn't.
"""


class StoreRankGroup:
    """The rank group of several processes with a common store, which is in rank 0."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        members: Sequence[int] | None = None,
        waits: Waits | None = None,
        *,
        limits: TimeLimits | None = None,
    ) -> None:
        """Open the group of `world_size` ranks, whose ranks in the default process group are `members`.

        `waits` ends the waits for other ranks, and is notified of a lost one.
        """
        self.limits: Final = limits or TimeLimits()
        self._waits = waits or Waits()
        self._watch = PeerWatch(self, rank, world_size, self._waits)
        self._store = store
        self.rank: Final = rank
        self.world_size: Final = world_size
        self.ranks: Final = ranks_in_group(rank, range(world_size) if members is None else members)
        self._callers = StoreCallers(store)
        self._aborted = threading.Event()
        self._broadcasts: deque[str] = deque(maxlen=_REMEMBERED)
        """On rank 0, names of broadcasts that other ranks may not have read."""

    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        if self.rank == 0:
            if value is None:
                raise PeerLostError(f"{name}: rank 0 has no value to give")
            self.publish(name, value)
            self._broadcasts.append(name)
            return dict(value)
        found = self._await(name, SilenceLimit(timeout_s, time.monotonic()), waiting_for=0)
        # Rank 0 may leave, with the store, as soon as the value is read. The count isn't needed then.
        with suppress(PeerLostError):
            self._ask(lambda client: self._note_read(client, name))
        return found

    def _note_read(self, client: Store, name: str) -> None:
        # The last reader deletes the value, since a job makes many. No rank waits for the deletion.
        if client.add(name + _READERS, 1) == self.world_size - 1:
            client.delete_key(name)
            client.delete_key(name + _READERS)

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        self.publish(f"{name}/{self.rank}", value)
        if self.rank != 0:
            return []
        limit = SilenceLimit(timeout_s, time.monotonic())
        values = [self._await(f"{name}/{rank}", limit, waiting_for=rank) for rank in range(self.world_size)]
        # No other rank reads the values. A job makes many, which would fill the memory of rank 0.
        self._ask(lambda client: [client.delete_key(f"{name}/{rank}") for rank in range(self.world_size)])
        return values

    def abort(self) -> None:
        self._aborted.set()

    def watch_peers(self) -> None:
        self._watch.start(
            self.store_host,
            lambda name, rank: self._await(
                name, SilenceLimit(_ADDRESS_S, time.monotonic()), waiting_for=rank
            ),
        )

    def look_for_loss(self) -> None:
        self._watch.look_for_loss()

    def heartbeat(self) -> AbstractContextManager[Callable[[int], None]]:
        return _beating(self.beat, self.end_beats)

    def beat(self, moved_bytes: int) -> None:
        """Publish a heartbeat, and add `moved_bytes` to the count. Waiting ranks then expect more heartbeats."""

        def add(client: Store) -> None:
            client.add(f"{_BEATS}/{self.rank}", 1)
            if moved_bytes:
                client.add(_MOVED, moved_bytes)

        self._ask(add, self.limits.store_answer_s)

    def end_beats(self, n_beats: int) -> None:
        """Subtract `n_beats` heartbeats. Other ranks expect no more, unless another save's make the count positive."""
        self._ask(lambda client: client.add(f"{_BEATS}/{self.rank}", -n_beats), self.limits.store_answer_s)

    def announce_leave(self, error: BaseException | None, timeout_s: float) -> None:
        self._watch.announce_leave(error, timeout_s)

    def announce_loss(self, rank: int, why: str) -> StepkeeperError:
        """Announce that a rank is lost, and return the error that names the rank that was announced first."""
        return self._watch.announce_loss(rank, why)

    def leave(self, timeout_s: float) -> None:
        ends_s = time.monotonic() + timeout_s
        # Without the store, in another process (as torchrun's may be), no rank can read any more.
        with suppress(PeerLostError):
            for name in self._broadcasts:
                while (left_s := ends_s - time.monotonic()) > 0 and self._is_there(name, left_s):
                    time.sleep(_SHORTEST_PAUSE_S)

    def _is_there(self, name: str, within_s: float) -> bool:
        return self._ask(lambda client: bool(client.check([name])), within_s)

    def propose(self, name: str, value: Mapping[str, Any], *, within_s: float | None = None) -> None:
        text = json.dumps(value)
        self._ask(lambda client: client.compare_set(name, "", text), within_s)

    def publish(self, name: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(value)
        self._ask(lambda client: client.set(name, text))

    def read_proposal(self, name: str, *, within_s: float | None = None) -> dict[str, Any] | None:
        data = self._ask(lambda client: client.get(name) if client.check([name]) else None, within_s)
        return None if data is None else dict(json.loads(data))

    @property
    def store_host(self) -> str | None:
        store: Any = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        host = getattr(store, "host", None)
        return host if isinstance(host, str) else None

    def _await(self, name: str, limit: SilenceLimit, waiting_for: int) -> dict[str, Any]:
        """Wait for the value of `name`.

        Raises PeerLostError if it doesn't come within `limit`, the rank `waiting_for` hangs or has left, or any rank is
        lost; NoticeDeadlineError.
        """
        since_s = time.monotonic()
        look_s, pause_s = since_s + _LOOK_S, _SHORTEST_PAUSE_S
        beat_limit = SilenceLimit(self.limits.apart_s, since_s)
        # The store's own wait ignores `abort`, and writes to stderr when its time is up.
        while (found := self.read_proposal(name)) is None:
            now_s = time.monotonic()
            if limit.is_over(now_s) or self._aborted.wait(pause_s):
                raise PeerLostError(
                    f"rank {self.rank} waited {now_s - since_s:.1f} s for rank {waiting_for} ({name}): that rank "
                    "is lost or far behind"
                )
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if now_s <= look_s:
                continue
            look_s = now_s + _LOOK_S
            if self._is_silent(waiting_for, limit, beat_limit, now_s):
                raise PeerLostError(
                    f"rank {waiting_for} hangs: it sent no heartbeat for {self.limits.apart_s:.1f} s while "
                    f"rank {self.rank} waited for it ({name})"
                )
            try:
                self._watch.check_wait(waiting_for, since_s)
            except StepkeeperError:
                # A rank may put its value and leave: the value counts.
                if (found := self.read_proposal(name)) is None:
                    raise
                return found
        return found

    def _is_silent(self, rank: int, limit: SilenceLimit, beat_limit: SilenceLimit, now_s: float) -> bool:
        """Read the heartbeats. Return True if a rank that should send them has been silent for too long."""
        n_beats, moved = self._read_beats(rank)
        if limit.has_moved(moved, now_s):
            self._waits.note_progress()
        # A rank outside of saves and restores sends none.
        if not n_beats or beat_limit.has_moved(n_beats, now_s):
            beat_limit.restart(now_s)
        return beat_limit.is_over(now_s)

    def read_moved(self) -> int:
        return int(self._ask(lambda client: client.add(_MOVED, 0)))

    def _read_beats(self, rank: int) -> tuple[int, int]:
        """Read a rank's heartbeat count, and the bytes that all ranks have moved."""
        return self._ask(lambda client: (client.add(f"{_BEATS}/{rank}", 0), client.add(_MOVED, 0)))

    def _ask(self, call: Callable[[Store], T], within_s: float | None = None) -> T:
        """Call the store. It has `within_s` for its answer; None: as long as waits may continue.

        Raises PeerLostError if the store doesn't answer, or a rank is lost; NoticeDeadlineError.
        """
        since_s = time.monotonic()

        def check() -> None:
            if within_s is not None:
                return
            if self._aborted.is_set():
                raise PeerLostError(f"rank {self.rank} is ending and no longer waits for the ranks' store")
            self._waits.check(since_s)

        try:
            return self._callers.ask(
                call, self.limits.store_answer_s if within_s is None else within_s, check
            )
        except StepkeeperError:
            raise
        except TimeoutError as error:
            raise PeerLostError(
                f"rank {self.rank} gets no answer from rank 0, which holds the ranks' store: rank 0 hangs, or its "
                f"host is gone ({error})"
            ) from error
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank} has lost the ranks' store: {error}") from error

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, waits: Waits | None = None) -> Self:
        """Make the rank group of a torch.distributed process group; None means the default one."""
        # No other function returns the store of init_process_group. This one has kept its name since torch 1.9.
        from torch.distributed.distributed_c10d import _get_default_store

        members = dist.get_process_group_ranks(group)
        digest = _digest(members)
        _instances[digest] += 1
        store = PrefixStore(f"{_PREFIX}/{digest}/{_instances[digest]}", _get_default_store())
        limits = TimeLimits(_read_timeout_s(group))
        return cls(store, dist.get_rank(group), dist.get_world_size(group), members, waits, limits=limits)


@contextmanager
def _beating(beat: Callable[[int], None], end: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Send heartbeats in a thread while the block runs, and give it a function that counts moved bytes.

    `beat` publishes one, with the bytes since the last one. `end` subtracts the number of published ones at the end,
    in the same thread. A PeerLostError, without the store, ends the thread.
    """
    over = threading.Event()
    moved_bytes = 0

    def note_moved(n_bytes: int) -> None:
        nonlocal moved_bytes
        moved_bytes += n_bytes

    def run() -> None:
        published_bytes = n_beats = 0
        with suppress(PeerLostError):
            while True:
                now_bytes = moved_bytes
                beat(now_bytes - published_bytes)
                published_bytes, n_beats = now_bytes, n_beats + 1
                if over.wait(_BEAT_EVERY_S):
                    break
        with suppress(PeerLostError):
            end(n_beats)

    # From Python 3.12 on no thread starts while the interpreter ends. Without a first heartbeat, none are expected.
    with suppress(RuntimeError):
        threading.Thread(target=run, name="heartbeat", daemon=True).start()
    try:
        yield note_moved
    finally:
        over.set()


def _read_timeout_s(group: dist.ProcessGroup | None) -> float:
    """Read the timeout of the group's collectives."""
    from torch.distributed.constants import default_pg_nccl_timeout
    from torch.distributed.distributed_c10d import _get_default_store

    # Backends that are written in Python, as torch_xla's, have no options. Then the store has the timeout too.
    with suppress(AttributeError, RuntimeError):
        options = (group or dist.group.WORLD)._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]  # there is one  # noqa: SLF001  # torch has no other name
        return float(options._timeout.total_seconds())  # noqa: SLF001
    store: Any = _get_default_store()  # torch's stub lacks the property
    # torch's own default for NCCL is meant for collectives, not for a rank's work between them.
    chosen = store.timeout != default_pg_nccl_timeout
    return float(store.timeout.total_seconds()) if chosen and store.timeout else GROUP_TIMEOUT_S


def _digest(ranks: Sequence[int]) -> str:
    """Make a short name for these global ranks: all groups share one store."""
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
