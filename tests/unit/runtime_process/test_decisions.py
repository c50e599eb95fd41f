"""What is to be done after a step, however often it is asked."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.decisions import Decisions, Seen
from stepkeeper.gang import SoloGang, StoreGang
from stepkeeper.policy.save import AnyOf, Continuous, Disruptions, EveryNSteps, Moment, OnPreemption, SaveCost


def asked(decisions: Decisions, step: int) -> bool:
    decisions.stops(step)
    return decisions.due(step)


def test_a_save_that_was_asked_for_is_due_at_its_step_until_it_is_begun() -> None:
    decisions = Decisions(EveryNSteps(1000), SoloGang())
    assert not asked(decisions, 1)
    decisions.wish_save("request-1")
    assert [asked(decisions, 2), asked(decisions, 2)] == [True, True]
    decisions.save_begun()
    decisions.wish_save("request-1")
    assert [asked(decisions, 2), asked(decisions, 3)] == [False, False]


def test_a_save_that_was_asked_for_is_not_due_at_a_later_step() -> None:
    decisions = Decisions(EveryNSteps(1000), SoloGang())
    decisions.wish_save("request-1")
    assert [asked(decisions, 2), asked(decisions, 3)] == [True, False]


def test_a_save_may_still_be_asked_for_where_the_stop_is_not_heeded() -> None:
    decisions = Decisions(EveryNSteps(1000), SoloGang())
    decisions.wish_stop()
    assert decisions.stops(4)
    decisions.wish_save("request-1")
    assert asked(decisions, 5)
    assert decisions.stop_step == 4


def test_rank_0_alone_goes_by_what_it_sees() -> None:
    saving = True
    decisions = Decisions(Continuous(), SoloGang(), lambda: Seen(saving=saving))
    assert not asked(decisions, 1)
    saving = False
    assert [asked(decisions, 2), asked(decisions, 2), asked(decisions, 3)] == [True] * 3


def test_the_policy_is_told_all_that_is_known() -> None:
    told: list[Moment] = []

    class Noting:
        def due(self, moment: Moment) -> bool:
            told.append(moment)
            return False

    cost, disruptions = SaveCost(stall_s=1.0, duration_s=2.0), Disruptions(count=3, over_s=4.0)
    decisions = Decisions(
        Noting(), SoloGang(), lambda: Seen(saving=False, cost=cost, disruptions=disruptions)
    )
    assert not asked(decisions, 7)
    known_by_all, known_by_one = told
    assert known_by_all == Moment(step=7)
    assert (known_by_one.step, known_by_one.saving) == (7, False)
    assert (known_by_one.cost, known_by_one.disruptions) == (cost, disruptions)
    assert known_by_one.since_save_s > 0


def test_the_step_of_a_preemption_is_one_for_the_policy() -> None:
    stop = Decisions(AnyOf((EveryNSteps(1000), OnPreemption())), SoloGang())
    assert [stop.due(7, stopping=True), stop.due(7)] == [True, False]
    assert not Decisions(EveryNSteps(1000), SoloGang()).due(7, stopping=True)


class TalkingGang(StoreGang):
    """Counts what goes through the store."""

    n_asked = 0

    def proposed(self, name: str) -> dict[str, Any] | None:  # type: ignore[explicit-override]  # Python 3.11 has none
        if not name.startswith(("round/", "agreement/")):
            self.n_asked += 1
        return super().proposed(name)

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:  # type: ignore[explicit-override]  # Python 3.11 has none
        assert name.startswith(("round/", "agreement/")), "no other way to agree"
        return super().gather(name, value, timeout_s)


@pytest.mark.timeout(120)
def test_ranks_that_see_different_things_save_the_same_steps() -> None:
    store = HashStore()
    ranks = [
        Decisions(Continuous(), TalkingGang(store, rank, 3), lambda: Seen(saving=True)) for rank in range(3)
    ]
    for rank in ranks:
        rank.start()
    saving = True
    ranks[0]._see = lambda: Seen(saving=saving)
    saved: list[list[int]] = [[], [], []]
    for step in range(10**6):
        if step == 5:
            saving = False
        for rank, found in zip(ranks, saved, strict=True):
            if asked(rank, step):
                found.append(step)
                rank.save_begun()
        if all(saved):
            break
        time.sleep(0.001)  # the other ranks hear of it by a thread of theirs
    for rank in ranks:
        rank.close()
    assert saved[0][0] > 5
    assert saved[0][:1] == saved[1][:1] == saved[2][:1]
