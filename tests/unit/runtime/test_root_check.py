"""The proof before a claim: ranks as threads, stores as hosts see them, and a clock that nobody waits for."""

import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import pytest
from store_parts.behind import Behind
from typing_extensions import override

from stepkeeper.checkpoint.manifest import checkpoint_folder
from stepkeeper.coordination.root_check import RootProof, prove_shared
from stepkeeper.errors import (
    MissingObjectError,
    NotExclusiveError,
    StepkeeperError,
    StorageError,
    TransientStorageError,
    UnsharedRootError,
)
from stepkeeper.log import Log
from stepkeeper.retention.garbage import gc
from stepkeeper.storage.base import LOG_PREFIX, PROBE_PREFIX, ObjectStat, Store
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.posix import PosixStore
from stepkeeper.storage.retry import Patience


class Clock:
    """A time that goes on only when somebody sleeps; each rank has its own."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s

    @property
    def patience(self) -> Patience:
        return Patience(sleep=self.sleep)


class Room:
    """Keep the messages that the ranks leave for each other."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self.changed = threading.Condition()

    def put(self, name: str, value: Mapping[str, Any]) -> None:
        with self.changed:
            assert name not in self.values, "each name is used once"
            self.values[name] = dict(value)
            self.changed.notify_all()

    def wait_for(self, name: str) -> dict[str, Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: name in self.values, timeout=60), name
            return self.values[name]


class RankIn:
    def __init__(self, room: Room, rank: int, world_size: int) -> None:
        self.room, self.rank, self.world_size = room, rank, world_size

    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        if self.rank == 0:
            assert value is not None
            self.room.put(name, value)
        return self.room.wait_for(name)

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        self.room.put(f"{name}/{self.rank}", value)
        if self.rank:
            return []
        return [self.room.wait_for(f"{name}/{rank}") for rank in range(self.world_size)]


@final
class LateStore(Behind):
    """Show things late, as NFS may: a put is decided at once by the server, and seen by others after a while."""

    def __init__(self, store: Store, clock: Clock, seen_after_s: float) -> None:
        super().__init__(store)
        self.clock, self.seen_after_s = clock, seen_after_s

    @override
    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if self.clock.now_s < self.seen_after_s:
            raise MissingObjectError(f"{path} isn't seen yet")
        return self.store.read(path, offset, length)

    @override
    def list(self, prefix: str) -> list[ObjectStat]:
        return self.store.list(prefix) if self.clock.now_s >= self.seen_after_s else []


def outcomes(
    stores: Sequence[Store], hosts: Sequence[str] | None = None, clocks: Sequence[Clock] | None = None
) -> list[StepkeeperError | None]:
    """Return what `prove_shared` raised in each rank."""
    room, n_ranks = Room(), len(stores)
    times = clocks or [Clock() for _ in stores]
    names = hosts or [f"host-{rank}" for rank in range(n_ranks)]

    def prove(rank: int) -> StepkeeperError | None:
        try:
            ranks = RankIn(room, rank, n_ranks)
            prove_shared(stores[rank], ranks, host=names[rank], patience=times[rank].patience)
        except StepkeeperError as error:
            return error
        return None

    with ThreadPoolExecutor(n_ranks) as pool:
        return list(pool.map(prove, range(n_ranks)))


def failing(
    operation: str, error: Callable[[], Exception], times: int = 10**6
) -> Callable[[str, str, str], None]:
    left = [times]

    def fault(moment: str, name: str, path: str) -> None:
        if (moment, name) == ("before", operation) and left[0]:
            left[0] -= 1
            raise error()

    return fault


@pytest.mark.parametrize("n_ranks", [1, 2, 5])
def test_one_root_is_proven_and_nothing_stays(n_ranks: int) -> None:
    bucket = MemoryBucket()
    assert outcomes([MemoryStore(bucket) for _ in range(n_ranks)]) == [None] * n_ranks
    assert bucket.objects == {}


def test_folders_of_two_hosts_are_one_where_they_are_shared(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "disk")
    assert outcomes([PosixStore(tmp_path / "disk"), PosixStore(tmp_path / "mounted")]) == [None, None]
    assert [path for path in (tmp_path / "disk").rglob("*") if path.is_file()] == []


def test_two_hosts_with_disks_of_their_own_are_refused_at_once_and_named(tmp_path: Path) -> None:
    clocks = [Clock() for _ in range(4)]
    stores = [PosixStore(tmp_path / name) for name in ("one", "one", "two", "two")]
    raised = outcomes(stores, ["host-a", "host-a", "host-b", "host-b"], clocks)
    assert {type(error) for error in raised} == {UnsharedRootError}
    assert len({str(error) for error in raised}) == 1
    text = str(raised[3])
    assert "what host-a (rank 0) wrote there isn't seen by host-b (rank 2, 3: " in text
    assert str(tmp_path / "one") in text
    # The first on that host takes the name. The other may see it taken just then, and these clocks don't wait for it.
    assert min(clock.now_s for clock in clocks[2:]) < 5, "what can be taken is not waited for"
    for stat in stores[0].list("") + stores[2].list(""):
        pytest.fail(f"{stat.path} was left")


def test_what_a_file_system_shows_a_minute_late_is_waited_for() -> None:
    bucket = MemoryBucket()
    clocks = [Clock() for _ in range(3)]
    stores = [LateStore(MemoryStore(bucket), clock, 60.0 * rank) for rank, clock in enumerate(clocks[:2])]
    assert outcomes([*stores, MemoryStore(bucket)], clocks=clocks) == [None] * 3
    assert 60 <= clocks[1].now_s < 90
    assert bucket.objects == {}


def test_what_never_shows_is_given_up_after_90_s() -> None:
    bucket = MemoryBucket()
    clocks = [Clock(), Clock()]
    raised = outcomes(
        [MemoryStore(bucket, name="x"), LateStore(MemoryStore(bucket), clocks[1], 3600)], clocks=clocks
    )
    assert [type(error) for error in raised] == [UnsharedRootError] * 2
    assert "host-1 (rank 1: it isn't shown there yet)" in str(raised[0])
    assert 85 <= clocks[1].now_s < 100


def test_many_hosts_are_named_in_part() -> None:
    first, other = MemoryBucket(), MemoryBucket()
    raised = outcomes([MemoryStore(first)] + [MemoryStore(other)] * 20)
    assert "host-1 (rank 1: " in str(raised[0])
    assert "and 12 other hosts" in str(raised[0])


def test_a_name_that_can_be_taken_twice_is_refused() -> None:
    bucket = MemoryBucket()

    def forget(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("before", "put_if_absent"):
            bucket.objects.pop(path, None)

    raised = outcomes([MemoryStore(bucket, hook=forget), MemoryStore(bucket)])
    assert [type(error) for error in raised] == [NotExclusiveError] * 2


def test_a_name_that_another_host_can_take_too_is_refused() -> None:
    bucket = MemoryBucket()

    def forget(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("before", "put_if_absent"):
            bucket.objects.pop(path, None)

    raised = outcomes([MemoryStore(bucket), MemoryStore(bucket), MemoryStore(bucket, hook=forget)])
    assert [type(error) for error in raised] == [NotExclusiveError] * 3
    assert "two hosts took one name" in str(raised[1])


def test_a_store_without_an_answer_for_a_while_is_asked_again() -> None:
    bucket = MemoryBucket()
    faults = failing("put_if_absent", lambda: TransientStorageError("later"), 3)
    reads = failing("read", lambda: TransientStorageError("later"), 3)
    assert outcomes([MemoryStore(bucket, hook=faults), MemoryStore(bucket, hook=reads)]) == [None] * 2


def test_a_lost_answer_to_the_first_put_is_no_loss() -> None:
    bucket = MemoryBucket()
    to_lose = ["the answer"]

    def lose(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("after", "put_if_absent") and to_lose:
            raise TransientStorageError(f"{to_lose.pop()} was lost")

    assert outcomes([MemoryStore(bucket, hook=lose), MemoryStore(bucket)]) == [None] * 2


def test_who_may_not_write_is_told_so_in_all_ranks() -> None:
    fault = failing("put_if_absent", lambda: StorageError("not allowed"))
    raised = outcomes([MemoryStore(hook=fault), MemoryStore()])
    assert [str(error) for error in raised] == ["not allowed"] * 2


def leave_garbage(bucket: MemoryBucket) -> str:
    """Leave a save of the start before the last one, which no commit names."""
    store = MemoryStore(bucket)
    path = f"{checkpoint_folder(20, Log(store).begin().slot, 'a' * 32)}/__0_0.distcp"
    store.write(path, [b"data"])
    Log(store).begin()
    return path


def full_while(bucket: MemoryBucket, path: str) -> Callable[[str, str, str], None]:
    def refuse(moment: str, operation: str, _path: str) -> None:
        if (moment, operation) == ("before", "put_if_absent") and path in bucket.objects:
            raise StorageError(errno.ENOSPC, "no space left on device")

    return refuse


def test_on_a_full_disk_what_nobody_needs_is_deleted_first() -> None:
    bucket = MemoryBucket()
    path = leave_garbage(bucket)
    stores = [MemoryStore(bucket, hook=full_while(bucket, path)), MemoryStore(bucket)]
    assert outcomes(stores) == [None, None]
    assert path not in bucket.objects


def test_where_that_is_not_enough_all_ranks_are_told_what_is() -> None:
    bucket = MemoryBucket()
    garbage = leave_garbage(bucket)
    bucket.objects["7/1-" + "b" * 32 + "/__0_0.distcp"] = b"the last start may yet commit it"
    kept = next(path for path in bucket.objects if path.startswith("7/"))
    raised = outcomes([MemoryStore(bucket, hook=full_while(bucket, kept)), MemoryStore(bucket)])
    for error in raised:
        assert type(error) is StorageError
        assert "no space left" in str(error)
        assert "`stepkeeper gc memory://`" in str(error)
    assert (garbage in bucket.objects, kept in bucket.objects) == (False, True)


def test_a_rank_that_may_not_read_is_named() -> None:
    bucket = MemoryBucket()
    fault = failing("read", lambda: StorageError("not allowed"))
    raised = outcomes([MemoryStore(bucket), MemoryStore(bucket, hook=fault)])
    assert "host-1 (rank 1: not allowed)" in str(raised[0])
    assert bucket.objects == {}


def test_it_is_proven_once() -> None:
    paths: list[str] = []
    store = MemoryStore(hook=lambda moment, operation, path: paths.append(path))
    proof = RootProof(store, RankIn(Room(), 0, 1))
    proof.make()
    assert set(paths) > {LOG_PREFIX}
    assert all(path.startswith(f"{PROBE_PREFIX}00000000-") for path in set(paths) - {LOG_PREFIX})
    paths.clear()
    proof.make()
    assert paths == []


@pytest.mark.parametrize("operation", ["read", "put_if_absent"])
def test_a_proof_whose_object_a_later_claim_collected_is_made_again(operation: str) -> None:
    bucket = MemoryBucket()
    asked: list[str] = []

    def collect(moment: str, name: str, path: str) -> None:
        """Collect as another job does that begins and saves while the last rank is about to look."""
        if (moment, name) == ("before", operation):
            asked.append(path)
            if len(asked) == 1:
                log = Log(MemoryStore(bucket))
                log.begin()
                assert gc(log, MemoryStore(bucket)).remnants == (path,)

    raised = outcomes([MemoryStore(bucket), MemoryStore(bucket, hook=collect)])
    assert raised == [None, None]
    assert asked[0].startswith(f"{PROBE_PREFIX}00000000-")
    assert asked[-1].startswith(f"{PROBE_PREFIX}00000001-")
    assert list(bucket.objects) == [f"{LOG_PREFIX}00000000.json"]
