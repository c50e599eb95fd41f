"""Process groups share one store, and nothing in it."""

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.errors import PeerLostError


class Processes:
    """This process as several: `enter` makes it another one, which has made no rank group yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        store = HashStore()
        self._set("torch.distributed.distributed_c10d._get_default_store", lambda: store)

    def enter(self) -> None:
        self._set("stepkeeper.coordination.store_rank_group._instances", Counter())

    def rank_group_of(self, members: list[int], rank: int) -> StoreRankGroup:
        self._set("torch.distributed.get_process_group_ranks", lambda _group: members)
        self._set("torch.distributed.get_rank", lambda _group: members.index(rank))
        self._set("torch.distributed.get_world_size", lambda _group: len(members))
        return StoreRankGroup.of(dist.group.WORLD)

    def _set(self, name: str, value: Any) -> None:
        self.monkeypatch.setattr(name, value)


@pytest.fixture(name="processes")
def _processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def test_disjoint_groups_hear_nothing_of_each_other(processes: Processes) -> None:
    processes.enter()
    first = processes.rank_group_of([0, 1], 0)
    processes.enter()
    other = processes.rank_group_of([2, 3], 2)
    first.propose("name", {"of": "first"})
    assert other.read_proposal("name") is None


def test_a_group_is_the_same_to_all_its_ranks_whatever_others_they_are_in(processes: Processes) -> None:
    processes.enter()
    processes.rank_group_of([0, 1], 0)
    mine = processes.rank_group_of([0, 1, 2], 0)
    processes.enter()
    theirs = processes.rank_group_of([0, 1, 2], 2)
    mine.propose("name", {"of": "all"})
    assert theirs.read_proposal("name") == {"of": "all"}


def test_what_was_gathered_is_kept_nowhere() -> None:
    store = HashStore()
    first, second = (StoreRankGroup(store, rank, 2) for rank in range(2))
    for number in range(5):
        assert second.gather(f"save/{number}", {"rank": 1}, 1.0) == []
        assert first.gather(f"save/{number}", {"rank": 0}, 1.0) == [{"rank": 0}, {"rank": 1}]
    assert store.num_keys() == 0


def test_what_was_broadcast_is_kept_until_all_have_read_it() -> None:
    store = HashStore()
    rank_groups = [StoreRankGroup(store, rank, 4) for rank in range(4)]
    for number in range(5):
        for rank_group in rank_groups[:3]:
            assert rank_group.broadcast(
                f"save/{number}", {"n": number} if rank_group.rank == 0 else None, 1.0
            ) == {"n": number}
        assert store.num_keys() == 2
        assert rank_groups[3].broadcast(f"save/{number}", None, 1.0) == {"n": number}
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


def test_who_waits_for_a_rank_hears_which_one_was_lost_first(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepkeeper.coordination.store_rank_group._LOOK_S", 0)
    processes.enter()
    rank_group = processes.rank_group_of([0, 1, 2], 0)
    assert str(rank_group.announce_loss(2, "its connection ended")) == "rank 2 is lost: its connection ended"
    # Who has lost that one next is no cause.
    assert str(rank_group.announce_loss(1, "its connection ended")) == "rank 2 is lost: its connection ended"
    with pytest.raises(PeerLostError, match="rank 2 is lost: its connection ended"):
        rank_group.gather("all", {}, 30)
    assert rank_group.store_host is None
