"""A rank that stops in the middle of a save is missed after the time for which ranks may be apart, not a store's."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination import heartbeat, store_rank_group
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
    last.beat(0)
    with pytest.raises(PeerLostError, match="rank 1 stands still: it gave no sign of life for"):
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


def test_a_rank_that_runs_and_moves_nothing_is_waited_for_until_the_limit(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = two_ranks()
    looking(monkeypatch, lambda: last.beat(0 if clock.now_s > 2 * VOTE_S else 10))
    with pytest.raises(PeerLostError, match="it is lost or far behind"):
        first.gather("save/3/vote", {}, VOTE_S)
    assert 3 * VOTE_S < clock.now_s < 4 * VOTE_S


@pytest.mark.parametrize("was_in_a_save", [True, False])
def test_a_rank_that_is_in_no_save_promises_nothing(clock: Clock, *, was_in_a_save: bool) -> None:
    first, last = two_ranks()
    if was_in_a_save:
        last.beat(0)
        last.end_beats()
    with pytest.raises(PeerLostError, match="it is lost or far behind"):
        first.gather("save/3/vote", {}, 10 * GROUP_S)
    assert clock.now_s > 10 * GROUP_S


def test_beats_come_for_as_long_as_the_block_lasts_and_tell_what_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beats, came, ended = list[int](), threading.Semaphore(0), threading.Event()

    def beat(n_bytes: int) -> None:
        beats.append(n_bytes)
        came.release()

    def end() -> None:
        beats.append(-1)
        ended.set()

    monkeypatch.setattr(heartbeat, "EVERY_S", 0.0)
    with heartbeat.beating(beat, end) as note_moved:
        assert came.acquire(timeout=LONGEST_S)
        note_moved(3)
        note_moved(4)
        while sum(beats) < 7:
            assert came.acquire(timeout=LONGEST_S)
        assert came.acquire(timeout=LONGEST_S)
    assert ended.wait(LONGEST_S)
    assert beats[0] == 0
    assert (sum(beats[:-1]), beats[-1]) == (7, -1)
