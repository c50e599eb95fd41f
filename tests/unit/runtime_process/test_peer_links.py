"""A rank whose process ends is missed by its neighbours at once, unless it has said that it leaves."""

import os
import queue
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination.peer_links import PeerLinks, neighbours
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import FencedError, PeerLostError

Lost = queue.SimpleQueue[tuple[int, str]]


@pytest.mark.parametrize("world_size", [1, 2, 9, 10, 75, 1000])
def test_the_tree_has_all_ranks_and_both_ends_know_of_each_connection(world_size: int) -> None:
    above = {rank: neighbours(rank, world_size)[0] for rank in range(world_size)}
    below = [(rank, each) for rank in range(world_size) for each in neighbours(rank, world_size)[1]]
    assert sorted(each for _, each in below) == list(range(1, world_size))
    assert all(above[each] == rank for rank, each in below)
    assert above[0] is None


@pytest.fixture(name="pair")
def _pair() -> Iterator[tuple[PeerLinks, PeerLinks, Lost, Lost]]:
    first_lost, last_lost = Lost(), Lost()
    first = PeerLinks(0, 2, lambda rank, why: first_lost.put((rank, why)))
    last = PeerLinks(1, 2, lambda rank, why: last_lost.put((rank, why)))
    last.connect_above(0, first.describe(None))
    while not first._socks:
        os.sched_yield()
    yield first, last, first_lost, last_lost
    for each in (first, last):
        each.close(bye=True)


def test_a_rank_that_ends_is_lost(pair: tuple[PeerLinks, PeerLinks, Lost, Lost]) -> None:
    _, last, first_lost, last_lost = pair
    last.close(bye=False)
    assert first_lost.get(timeout=30)[0] == 1
    assert last_lost.empty()


def test_a_rank_that_leaves_in_order_is_not_lost(pair: tuple[PeerLinks, PeerLinks, Lost, Lost]) -> None:
    first, last, first_lost, last_lost = pair
    first.close(bye=True)
    last.close(bye=True)
    assert first_lost.empty()
    assert last_lost.empty()


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
    monkeypatch.setattr("stepkeeper.coordination.store_rank_group._LOOK_S", 0)
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


def test_a_forked_child_that_ends_says_nothing_for_its_parents_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, _), _ = rank_groups(monkeypatch)
    child = os.fork()
    if child == 0:
        first.announce_leave(ValueError("a bug of the worker"), 1.0)
        os._exit(0 if first.read_proposal("lost") is None else 1)
    assert os.waitpid(child, 0)[1] == 0
