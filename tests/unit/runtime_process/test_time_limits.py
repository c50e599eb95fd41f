"""A wait lasts as long as there is progress, and no longer without it than the speed explains."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from stepkeeper.checkpoint.blocks import Block, BlockTable
from stepkeeper.checkpoint.reading import BlockReader
from stepkeeper.companion import client
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import CompanionLostError, PeerLostError, SaveError, StorageError
from stepkeeper.restore.filling import Filling, Peers
from stepkeeper.restore.placing import Places
from stepkeeper.save.persist import persist_save
from stepkeeper.save.snapshot import transfer
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import Snapshot, SnapshotTaker
from stepkeeper.time_limits import TimeLimits
from stepkeeper_testing.saves import job_of

GB = 10**9


def test_limits_follow_the_size_of_a_share_and_the_timeout_of_the_group() -> None:
    limits = TimeLimits(60)
    assert [limits.share_silence_s(size) for size in (0, 10 * GB, 100 * GB)] == [900, 900, 5000]
    assert (limits.vote_s(100 * GB), limits.transfer_s(GB), limits.transfer_s(2 * GB)) == (10_000, 60, 100)
    assert (limits.start_s, limits.apart_s, limits.store_answer_s) == (120, 120, 60)
    limits.note_meeting()
    assert (limits.start_s, limits.apart_s) == (120, 60)


class Clock:
    """A clock that advances by the waited time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Slow(Future[dict[str, Any]]):
    """An answer that comes at `due_s`."""

    def __init__(self, clock: Clock, due_s: float) -> None:
        super().__init__()
        self.clock = clock
        self.due_s = due_s

    def result(self, timeout: float | None = None) -> dict[str, Any]:  # type: ignore[explicit-override]  # Python 3.11 has none
        assert timeout is not None
        self.clock.now_s = min(self.due_s, self.clock.now_s + timeout)
        if self.clock.now_s < self.due_s:
            raise TimeoutError
        return {"durable": True}


@pytest.mark.parametrize(
    ("moves_until_s", "due_s", "ended_s"),
    [(7200, 7200, None), (0, 90, None), (0, 200, 100), (5000, 7200, 5100), (7150, 7200, None)],
)
def test_only_silence_ends_the_wait_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, moves_until_s: float, due_s: float, ended_s: float | None
) -> None:
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)

    def moves() -> bool:
        return 0 < clock.now_s <= moves_until_s

    answer = Slow(clock, due_s)
    if ended_s is None:
        assert client._await_answer(answer, 100.0, 100.0, moves) == {"durable": True}
        return
    with pytest.raises(TimeoutError):
        client._await_answer(answer, 100.0, 100.0, moves)
    assert ended_s <= clock.now_s <= ended_s + 2 * client._LOOK_S


class Transfer(Future[None]):
    """Copies of which 100 bytes a second move until `stands_at_s`, and are there at `due_s`."""

    def __init__(self, clock: Clock, snapshot: Snapshot, stands_at_s: float, due_s: float) -> None:
        super().__init__()
        self.clock, self.snapshot, self.stands_at_s, self.due_s = clock, snapshot, stands_at_s, due_s

    @override
    def result(self, timeout: float | None = None) -> None:
        assert timeout is not None
        self.clock.now_s = min(self.due_s, self.clock.now_s + timeout)
        self.snapshot.moved_bytes = 100 * int(min(self.clock.now_s, self.stands_at_s))
        if self.clock.now_s < self.due_s:
            raise TimeoutError


class Told(SoloRankGroup):
    """A rank group that records this rank's progress."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = TimeLimits()  # type: ignore[misc]  # a rank group's own is final
        self.told_bytes: list[int] = []

    @override
    def heartbeat(self) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(self.told_bytes.append)


@pytest.mark.parametrize(
    ("stands_at_s", "due_s", "ended_s", "error"),
    [
        pytest.param(5400, 5400, 5400, "the transfer is over", id="copies that come slowly"),
        pytest.param(
            900,
            18000,
            2700,
            "the copies of the state did not come from the devices: nothing came for 1800 s",
            id="copies that come no more",
        ),
    ],
)
def test_only_silence_ends_the_wait_for_copies(
    monkeypatch: pytest.MonkeyPatch, stands_at_s: float, due_s: float, ended_s: float, error: str
) -> None:
    def lost() -> None:
        raise CompanionLostError("the transfer is over")

    clock, rank_group, region = Clock(), Told(), Region()
    monkeypatch.setattr(transfer, "time", clock)
    snapshot = SnapshotTaker(rank_group.ranks).take_snapshot({"step": 7}, region)
    claimed = SimpleNamespace(claim=SimpleNamespace(slot=0))
    companion = SimpleNamespace(claim_root=lambda **_: claimed, ensure_process=lost)
    job = job_of(snapshot, region, Transfer(clock, snapshot, stands_at_s, due_s))
    with pytest.raises((CompanionLostError, SaveError), match=error):
        persist_save(job, cast(Companion, companion), rank_group)
    assert clock.now_s == pytest.approx(ended_s, rel=0.01)
    assert sum(rank_group.told_bytes) == pytest.approx(100 * min(stands_at_s, due_s), rel=0.01)


class Short(TimeLimits):
    silence_s = 0.01


class Reading(SoloRankGroup):
    """After five looks something has moved elsewhere."""

    def __init__(self, free: threading.Event, *, moves: bool) -> None:
        super().__init__()
        self.limits = Short()  # type: ignore[misc]  # a rank group's own is final
        self.free, self.moves, self.n_looks = free, moves, 0

    @override
    def read_moved(self) -> int:
        if self.moves:
            self.n_looks += 1
        if self.n_looks == 5:
            self.free.set()
        return self.n_looks


def filling_of(rank_group: Reading) -> Filling:
    """Of one block, whose read waits."""

    def read_block(*_: object) -> bytes:
        rank_group.free.wait(60)
        return bytes(4)

    place: Any = SimpleNamespace(n_lacking=4, copy_bytes=lambda _start, data: len(data))
    places = Places(pieces=[place], values={}, by_block={0: [place]})
    table = BlockTable(blocks=(Block(number=0, path="a", index=0, size_bytes=4),), first_numbers={"a": 0})
    reader = cast(BlockReader, SimpleNamespace(read_block=read_block))
    return Filling(reader, table, places, rank_group=rank_group)


@pytest.mark.parametrize(("shared", "error"), [(False, StorageError), (True, PeerLostError)])
def test_a_restore_that_gets_nothing_ends(shared: bool, error: type[Exception]) -> None:
    free = threading.Event()
    peers = cast(Peers, SimpleNamespace(announce_failure=lambda _: free.wait(60)))
    with pytest.raises(error, match="no bytes have come"):
        filling_of(Reading(free, moves=False)).run({0: ()}, peers if shared else None)
    assert not free.is_set()
    free.set()


def test_a_rank_that_waits_for_blocks_of_others_goes_on_while_these_read_their_own() -> None:
    reading = Reading(threading.Event(), moves=True)
    filling_of(reading).run({0: ()}, cast(Peers, SimpleNamespace()))
    assert reading.n_looks >= 5
