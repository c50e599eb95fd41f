"""A rank that stops in the middle of a save is missed after the time for which ranks may be apart, not a store's."""

import threading
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination import store_rank_group
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.errors import PeerLostError
from stepkeeper.time_limits import TimeLimits

GROUP_S = 4.0
VOTE_S = 60.0
"""Far longer. By default it is 1800: how long a share may be silent while its store gives no answer, twice."""

LONGEST_S = 20


class Clock:
    """Goes on by itself, by as much as it is asked for."""

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
        each.record_meeting(0.1)
    first, last = (StoreRankGroup(store, rank, 2, limits=limits[rank]) for rank in range(2))
    return first, last


def test_a_rank_that_stands_still_in_a_save_is_missed_soon(clock: Clock) -> None:
    first, last = two_ranks()
    last.give_sign_of_life()
    with pytest.raises(PeerLostError, match="rank 1 stands still: it gave no sign of life for"):
        first.gather("save/3/vote", {}, VOTE_S)
    assert GROUP_S < clock.now_s < 2 * GROUP_S


def test_rank_0_is_missed_as_soon(clock: Clock) -> None:
    """The store that still answers may be in another process than rank 0, as torchrun's is."""
    first, last = two_ranks()
    first.give_sign_of_life()
    with pytest.raises(PeerLostError, match="rank 0 stands still"):
        last.broadcast("save/3/outcome", None, 2 * VOTE_S)
    assert clock.now_s < 2 * GROUP_S


def test_a_rank_that_runs_is_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = two_ranks()
    read_moved = StoreRankGroup.read_moved

    def look(rank_group: StoreRankGroup) -> int:
        last.give_sign_of_life()
        if clock.now_s > 5 * GROUP_S:
            last.gather("save/3/vote", {"rank": 1}, VOTE_S)
        return read_moved(rank_group)

    monkeypatch.setattr(StoreRankGroup, "read_moved", look)
    assert first.gather("save/3/vote", {"rank": 0}, VOTE_S) == [{"rank": 0}, {"rank": 1}]


@pytest.mark.parametrize("was_in_a_save", [True, False])
def test_a_rank_that_is_in_no_save_promises_nothing(clock: Clock, *, was_in_a_save: bool) -> None:
    first, last = two_ranks()
    if was_in_a_save:
        last.give_sign_of_life()
        last.promise_no_more_signs()
    with pytest.raises(PeerLostError, match="it is lost or far behind"):
        first.gather("save/3/vote", {}, 10 * GROUP_S)
    assert clock.now_s > 10 * GROUP_S


def test_signs_are_given_for_as_long_as_the_block_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, last = two_ranks()
    signs, second, ended = list[str](), threading.Event(), threading.Event()

    def sign() -> None:
        signs.append("alive")
        if len(signs) == 2:
            second.set()

    def end() -> None:
        signs.append("no more")
        ended.set()

    monkeypatch.setattr("stepkeeper.coordination.signs_of_life.EVERY_S", 0.0)
    monkeypatch.setattr(last, "give_sign_of_life", sign)
    monkeypatch.setattr(last, "promise_no_more_signs", end)
    with last.signs_of_life():
        assert second.wait(LONGEST_S)
    assert ended.wait(LONGEST_S)
    assert signs[-1] == "no more"
    assert set(signs[:-1]) == {"alive"}
