"""Ranks exchange values over a store: nothing stays in it, and a rank that ends or hangs is noticed."""

import os
import queue
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination import store_rank_group
from stepkeeper.coordination.peer_links import PeerLinks, neighbors
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import FencedError, PeerLostError
from stepkeeper.time_limits import TimeLimits


def test_disjoint_groups_hear_nothing_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each process made no group before."""
    store, groups = HashStore(), list[StoreRankGroup]()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    monkeypatch.setattr("torch.distributed.get_rank", lambda _group: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _group: 2)
    for members in ([0, 1], [2, 3]):
        monkeypatch.setattr(store_rank_group, "_instances", Counter())
        monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda _group, found=members: found)
        groups.append(StoreRankGroup.of(dist.group.WORLD))
    groups[0].propose("name", {"of": "first"})
    assert groups[1].read_proposal("name") is None


def test_what_was_said_is_kept_until_all_have_read_it() -> None:
    store = HashStore()
    ranks = [StoreRankGroup(store, rank, 4) for rank in range(4)]
    for number in range(5):
        name, value = f"save/{number}", {"n": number}
        assert [each.gather(name, {"rank": each.rank}, 1.0) for each in ranks[:0:-1]] == [[]] * 3
        assert ranks[0].gather(name, {"rank": 0}, 1.0) == [{"rank": rank} for rank in range(4)]
        assert store.num_keys() == 0
        for each in ranks[:3]:
            assert each.broadcast(name, None if each.rank else value, 1.0) == value
        assert store.num_keys() == 2
        assert ranks[3].broadcast(name, None, 1.0) == value
        assert store.num_keys() == 0


def test_rank_0_stays_until_all_have_read_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    first, second = (StoreRankGroup(store, rank, 2) for rank in range(2))
    first.broadcast("outcome", {"committed": 20}, 1.0)
    first.broadcast("all-done", {"ranks": 2}, 1.0)
    unread = ["outcome", "all-done"]
    # The other rank reads while this one pauses.
    monkeypatch.setattr(
        "stepkeeper.coordination.store_rank_group.time.sleep",
        lambda _s: second.broadcast(unread.pop(0), None, 1.0),
    )
    first.leave(60.0)
    assert unread == []
    assert store.num_keys() == 0


def test_who_waits_for_a_rank_hears_which_one_was_lost_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_rank_group, "_LOOK_S", 0)
    rank_group = StoreRankGroup(HashStore(), 0, 3)
    # Who has lost that one next is no cause.
    for lost in (2, 1):
        found = rank_group.announce_loss(lost, "its connection ended")
        assert str(found) == "rank 2 is lost: its connection ended"
    with pytest.raises(PeerLostError, match="rank 2 is lost: its connection ended"):
        rank_group.gather("all", {}, 30)


Lost = queue.SimpleQueue[tuple[int, str]]


@pytest.mark.parametrize("world_size", [1, 2, 9, 10, 75, 1000])
def test_the_tree_has_all_ranks_and_both_ends_know_of_each_connection(world_size: int) -> None:
    above = {rank: neighbors(rank, world_size)[0] for rank in range(world_size)}
    below = [(rank, each) for rank in range(world_size) for each in neighbors(rank, world_size)[1]]
    assert sorted(each for _, each in below) == list(range(1, world_size))
    assert all(above[each] == rank for rank, each in below)
    assert above[0] is None


def test_a_rank_that_ends_is_lost() -> None:
    first_lost, last_lost = Lost(), Lost()
    first = PeerLinks(0, 2, lambda rank, why: first_lost.put((rank, why)))
    last = PeerLinks(1, 2, lambda rank, why: last_lost.put((rank, why)))
    last.connect_above(0, first.describe(None))
    while not first._socks:
        os.sched_yield()
    last.close(bye=False)
    assert first_lost.get(timeout=30)[0] == 1
    assert last_lost.empty()
    first.close(bye=True)


def test_a_forked_worker_does_not_hide_that_its_trainer_was_killed() -> None:
    lost = Lost()
    first = PeerLinks(0, 2, lambda rank, why: lost.put((rank, why)))
    address = first.describe(None)
    reading, writing = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        links = PeerLinks(1, 2, lambda _rank, _why: None)
        links.connect_above(0, address)
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)  # until the test has closed its end
        os._exit(0)
    try:
        os.waitpid(trainer, 0)
        assert lost.get(timeout=30)[0] == 1
    finally:
        os.close(writing)
        os.close(reading)
        first.close(bye=True)


def rank_groups(monkeypatch: pytest.MonkeyPatch) -> tuple[list[StoreRankGroup], list[Waits]]:
    monkeypatch.setattr(store_rank_group, "_LOOK_S", 0)
    store, waits = HashStore(), [Waits(), Waits()]
    return [StoreRankGroup(store, rank, 2, waits=waits[rank]) for rank in range(2)], waits


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError("a bug"), PeerLostError), (FencedError("claim 7 owns it"), FencedError)],
)
def test_who_leaves_for_an_error_tells_it_to_those_that_wait(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    (first, last), (waits, _) = rank_groups(monkeypatch)
    last.announce_leave(error, 1.0)
    with pytest.raises(raised, match=f"rank 1 is lost: it left with {type(error).__name__}: {error}"):
        first.gather("save/3/vote", {}, 30)
    first.look_for_loss()
    assert isinstance(waits.loss, raised)


def test_nobody_waits_for_a_rank_that_has_left_in_order_and_nobody_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, last), (waits, _) = rank_groups(monkeypatch)
    last.gather("save/3/vote", {"rank": 1}, 30)
    last.announce_leave(None, 1.0)
    assert first.gather("save/3/vote", {"rank": 0}, 30) == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(PeerLostError, match="rank 1 has left, and rank 0 waits for it"):
        first.gather("save/4/vote", {"rank": 0}, 30)
    first.look_for_loss()
    assert waits.loss is None


GROUP_S = 4.0


VOTE_S = 60.0
"""Far longer. By default it is 1800: how long a share may be silent while its store gives no answer, twice."""


class Clock:
    """A clock that advances by itself, by the requested time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.01
        return self.now_s


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(store_rank_group, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(store_rank_group, "_LOOK_S", 0)
    monkeypatch.setattr(store_rank_group, "_SHORTEST_PAUSE_S", 0)
    monkeypatch.setattr(store_rank_group, "_LONGEST_PAUSE_S", 0)
    return clock


def two_ranks() -> tuple[StoreRankGroup, StoreRankGroup]:
    store, limits = HashStore(), [TimeLimits(GROUP_S) for _ in range(2)]
    for each in limits:
        each.note_meeting()
    first, last = (StoreRankGroup(store, rank, 2, limits=limits[rank]) for rank in range(2))
    return first, last


def test_a_rank_that_stands_still_in_a_save_is_missed_soon(clock: Clock) -> None:
    first, last = two_ranks()
    last.beat(0)
    with pytest.raises(PeerLostError, match="rank 1 hangs: it sent no heartbeat for"):
        first.gather("save/3/vote", {}, VOTE_S)
    assert GROUP_S < clock.now_s < 2 * GROUP_S


def looking(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Have this done whenever a rank that waits looks at the beats."""
    read_beats = StoreRankGroup._read_beats

    def look(rank_group: StoreRankGroup, rank: int) -> tuple[int, int]:
        act()
        return read_beats(rank_group, rank)

    monkeypatch.setattr(StoreRankGroup, "_read_beats", look)


def test_a_rank_that_runs_is_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = two_ranks()

    def run_on() -> None:
        last.beat(0)
        if clock.now_s > 5 * GROUP_S:
            last.gather("save/3/vote", {"rank": 1}, VOTE_S)

    looking(monkeypatch, run_on)
    assert first.gather("save/3/vote", {"rank": 0}, VOTE_S) == [{"rank": 0}, {"rank": 1}]
