"""Test the proof before a claim: ranks are threads, stores are as hosts see them, and the clock is fake."""

import errno
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import pytest
from store_parts.behind import Behind
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it
from typing_extensions import override

from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.coordination.root_check import prove_shared
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
from stepkeeper.storage.base import LOG_PREFIX, ObjectStat, Store
from stepkeeper.storage.posix import PosixStore
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import MemoryBucket, MemoryStore


class Clock:
    """A time that passes only when a thread sleeps; each rank has its own."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s

    @property
    def patience(self) -> Patience:
        return Patience(sleep=self.sleep)


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
    """Return the error of `prove_shared` in each rank."""
    ranks_store, n_ranks = HashStore(), len(stores)
    times = clocks or [Clock() for _ in stores]
    names = hosts or [f"host-{rank}" for rank in range(n_ranks)]

    def prove(rank: int) -> StepkeeperError | None:
        try:
            ranks = StoreRankGroup(ranks_store, rank, n_ranks)
            prove_shared(stores[rank], ranks, host=names[rank], patience=times[rank].patience)
        except StepkeeperError as error:
            return error
        return None

    with ThreadPoolExecutor(n_ranks) as pool:
        return list(pool.map(prove, range(n_ranks)))


@pytest.mark.parametrize("n_ranks", [1, 2, 9])
def test_ranks_that_share_a_root_are_let_through_and_leave_nothing(n_ranks: int) -> None:
    bucket = MemoryBucket()
    assert outcomes([MemoryStore(bucket) for _ in range(n_ranks)]) == [None] * n_ranks
    assert bucket.objects == {}


def test_two_hosts_with_disks_of_their_own_are_refused_at_once_and_named(tmp_path: Path) -> None:
    clocks = [Clock() for _ in range(4)]
    stores = [PosixStore(tmp_path / name) for name in ("one", "one", "two", "two")]
    raised = outcomes(stores, ["host-a", "host-a", "host-b", "host-b"], clocks)
    assert {type(error) for error in raised} == {UnsharedRootError}
    assert len({str(error) for error in raised}) == 1
    assert "host-a (rank 0) wrote is not seen by host-b (rank 2, 3: " in str(raised[3])
    assert str(tmp_path / "one") in str(raised[3])
    # The first on that host takes the name. The other may see it taken just then, and these clocks don't wait for it.
    assert min(clock.now_s for clock in clocks[2:]) < 5, "what can be taken is not waited for"
    assert stores[0].list("") + stores[2].list("") == []


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
    late = LateStore(MemoryStore(bucket), clocks[1], 3600)
    raised = outcomes([MemoryStore(bucket, name="x"), late], clocks=clocks)
    assert [type(error) for error in raised] == [UnsharedRootError] * 2
    assert "host-1 (rank 1: the store doesn't show it yet)" in str(raised[0])
    assert 85 <= clocks[1].now_s < 100


LATER = TransientStorageError("later")
NOT_ALLOWED = StorageError("not allowed")


FAULTS = {
    "a put that gets its answer later": (0, "before put_if_absent", LATER, 3, None, ""),
    "a put whose answer is lost": (0, "after put_if_absent", LATER, 1, None, ""),
    "a read that gets its answer later": (1, "before read", LATER, 3, None, ""),
    "no puts": (0, "before put_if_absent", NOT_ALLOWED, 9, StorageError, "not allowed"),
    "no reads": (1, "before read", NOT_ALLOWED, 9, UnsharedRootError, "(rank 1: not allowed)"),
    "it wins twice": (0, "before put_if_absent", "clear", 9, NotExclusiveError, ""),
    "two win": (2, "before put_if_absent", "clear", 9, NotExclusiveError, "two hosts took"),
}


@pytest.mark.parametrize(("rank", "when", "effect", "times", "error", "says"), FAULTS.values(), ids=FAULTS)
def test_a_fault_on_one_rank_is_outlasted_or_told_to_all(
    rank: int, when: str, effect: Any, times: int, error: type[Exception] | None, says: str
) -> None:
    bucket = MemoryBucket()
    hook = at(when, bucket.objects.clear if effect == "clear" else effect, times=times)
    raised = outcomes([MemoryStore(bucket, hook=hook if each == rank else None) for each in range(3)])
    assert [type(each) for each in raised] == [error or type(None)] * 3
    assert all(says in str(each) for each in raised)
    if effect != "clear":
        assert bucket.objects == {}


@pytest.mark.parametrize("is_enough", [True, False])
def test_on_a_full_disk_what_is_garbage_is_deleted_first_or_all_ranks_are_told_what_to_do(
    is_enough: bool,
) -> None:
    root = SmallRoot()
    assert isinstance(root.store, MemoryStore)
    bucket = root.store.bucket
    root.begin()
    garbage = f"{root.give_up(20)}/__0_0.distcp"
    root.begin(1)
    kept = f"{root.give_up(30)}/__0_0.distcp"

    def refuse() -> None:
        if (garbage if is_enough else kept) in bucket.objects:
            raise StorageError(errno.ENOSPC, "no space left on device")

    raised = outcomes([MemoryStore(bucket, hook=at("before put_if_absent", refuse)), MemoryStore(bucket)])
    assert [type(each) for each in raised] == [type(None) if is_enough else StorageError] * 2
    for error in raised:
        assert is_enough or ("no space left" in str(error) and "`stepkeeper gc memory://`" in str(error))
    assert (garbage in bucket.objects, kept in bucket.objects) == (False, True)


@pytest.mark.parametrize("operation", ["read", "put_if_absent"])
def test_a_proof_whose_object_a_later_claim_collected_names_that_claim(operation: str) -> None:
    """Another job begins and saves while the last rank is about to look."""
    bucket = MemoryBucket()

    def collect() -> None:
        log = Log(MemoryStore(bucket))
        log.begin()
        assert gc(log, MemoryStore(bucket)).remnants

    hook = at(f"before {operation}", collect, times=1)
    for raised in outcomes([MemoryStore(bucket), MemoryStore(bucket, hook=hook)]):
        assert isinstance(raised, TransientStorageError)
        assert "another process claimed this root" in str(raised)
    assert list(bucket.objects) == [f"{LOG_PREFIX}00000000.json"]
