"""What is to be done after a step, however often it is asked."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination.rank_group import SoloRankGroup, StoreRankGroup
from stepkeeper.policy.save import (
    AnyOf,
    Continuous,
    Disruptions,
    EveryNSteps,
    EverySeconds,
    Moment,
    OnPreemption,
    SaveCost,
    SavePolicy,
)
from stepkeeper.training.save_decision import Decisions, Seen


def asked(decisions: Decisions, step: int) -> bool:
    decisions.stops(step)
    return decisions.due(step)


def test_a_save_that_was_asked_for_is_due_at_its_step_until_it_is_begun() -> None:
    decisions = Decisions(EveryNSteps(1000), SoloRankGroup())
    assert not asked(decisions, 1)
    decisions.wish_save("request-1")
    assert [asked(decisions, 2), asked(decisions, 2)] == [True, True]
    decisions.save_begun()
    decisions.wish_save("request-1")
    assert [asked(decisions, 2), asked(decisions, 3)] == [False, False]


def test_a_save_that_was_asked_for_is_not_due_at_a_later_step() -> None:
    decisions = Decisions(EveryNSteps(1000), SoloRankGroup())
    decisions.wish_save("request-1")
    assert [asked(decisions, 2), asked(decisions, 3)] == [True, False]


def test_a_save_may_still_be_asked_for_where_the_stop_is_not_heeded() -> None:
    decisions = Decisions(EveryNSteps(1000), SoloRankGroup())
    decisions.wish_stop()
    assert decisions.stops(4)
    decisions.wish_save("request-1")
    assert asked(decisions, 5)
    assert decisions.stop_step == 4


def test_rank_0_alone_goes_by_what_it_sees() -> None:
    saving = True
    decisions = Decisions(Continuous(), SoloRankGroup(), lambda: Seen(saving=saving))
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
        Noting(), SoloRankGroup(), lambda: Seen(saving=False, cost=cost, disruptions=disruptions)
    )
    assert not asked(decisions, 7)
    known_by_all, known_by_one = told
    assert known_by_all == Moment(step=7)
    assert (known_by_one.step, known_by_one.saving) == (7, False)
    assert (known_by_one.cost, known_by_one.disruptions) == (cost, disruptions)
    assert known_by_one.since_save_s > 0


def test_the_step_of_a_preemption_is_one_for_the_policy() -> None:
    stop = Decisions(AnyOf((EveryNSteps(1000), OnPreemption())), SoloRankGroup())
    assert [stop.due(7, stopping=True), stop.due(7)] == [True, False]
    assert not Decisions(EveryNSteps(1000), SoloRankGroup()).due(7, stopping=True)


class TalkingRankGroup(StoreRankGroup):
    """Counts what goes through the store."""

    n_asked = 0

    def read_proposal(self, name: str) -> dict[str, Any] | None:  # type: ignore[explicit-override]  # Python 3.11 has none
        if not name.startswith(("round/", "agreement/")):
            self.n_asked += 1
        return super().read_proposal(name)

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:  # type: ignore[explicit-override]  # Python 3.11 has none
        assert name.startswith(("round/", "agreement/")), "no other way to agree"
        return super().gather(name, value, timeout_s)


class Trainings:
    """Ranks as threads, each at most `lead` steps ahead of the last one. Rank 0's clock counts its own steps."""

    def __init__(
        self, policy: SavePolicy, world_size: int, lead: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = self.steps = [0] * world_size
        monkeypatch.setattr("stepkeeper.coordination.step_agreement._POLL_S", 0.001)
        monkeypatch.setattr(
            "stepkeeper.training.save_decision.time", SimpleNamespace(monotonic=lambda: steps[0])
        )
        store = HashStore()
        self.saved: list[list[int]] = [[] for _ in range(world_size)]
        self.lead = lead
        self.moved = threading.Condition()
        self.ranks = [
            Decisions(policy, TalkingRankGroup(store, rank, world_size)) for rank in range(world_size)
        ]
        self.ranks[0]._see = lambda: Seen(saving=False)

    def run(self, enough: Callable[[list[int]], bool]) -> None:
        """Until rank 0 has saved `enough`, and all have stopped at one step."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            running = [pool.submit(self._train, rank, enough) for rank in range(len(self.ranks))]
            for each in running:
                each.result()
        for decisions in self.ranks:
            decisions.close()

    def _train(self, rank: int, enough: Callable[[list[int]], bool]) -> None:
        decisions, saved = self.ranks[rank], self.saved[rank]
        decisions.start()
        for step in range(1, 10**6):
            with self.moved:
                while step > min(self.steps) + self.lead:
                    assert self.moved.wait(60), "a rank is stuck"
                self.steps[rank] = step
                self.moved.notify_all()
            if decisions.stops(step):
                return
            if decisions.due(step):
                saved.append(step)
                decisions.save_begun()
                if rank == 0 and enough(saved):
                    decisions.wish_stop()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("after_s", "lead"), [(399, 1), (390, 3), (250, 1), (150, 3)])
def test_ranks_save_the_same_steps_and_each_for_a_reason(
    after_s: int, lead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps come up in each rank by itself, the time in rank 0: what one has done, the other doesn't repeat."""
    trainings = Trainings(AnyOf((EveryNSteps(400), EverySeconds(after_s))), 3, lead, monkeypatch)
    trainings.run(lambda saved: sum(step % 400 != 0 for step in saved) >= 3 or len(saved) >= 60)
    first, *others = trainings.saved
    assert others == [first, first]
    for before, step in pairwise((0, *first)):
        assert step % 400 == 0 or step - before >= after_s, f"{step} is saved though {before} was"


def agreed_on(decisions: Decisions) -> bool:
    """Waits until this rank knows of a step for a wish."""
    agreement = decisions._agreement
    with agreement._changed:
        return agreement._changed.wait_for(lambda: bool(agreement._agreed), 60)


@pytest.mark.timeout(120)
def test_a_wish_that_a_save_has_overtaken_is_dropped_in_all_ranks() -> None:
    """Rank 1 is ahead by the step that is saved anyway: what rank 0 wishes before that is agreed on for the next."""
    store, policy, saving = HashStore(), AnyOf((EveryNSteps(100), Continuous())), False
    behind = Decisions(policy, TalkingRankGroup(store, 0, 2), lambda: Seen(saving=saving))
    ahead = Decisions(policy, TalkingRankGroup(store, 1, 2))
    for decisions in (behind, ahead):
        decisions.start()
    assert asked(ahead, 100)
    ahead.save_begun()
    assert not asked(behind, 99), "it wishes to save the next step that it can"
    assert agreed_on(behind)
    assert agreed_on(ahead)
    assert asked(behind, 100)
    behind.save_begun()
    saving = True
    for decisions in (behind, ahead):
        assert not asked(decisions, 101)
    saving = False
    assert not asked(behind, 102), "it wishes the same again, after another save"
    assert agreed_on(behind)
    assert agreed_on(ahead)
    saving = True
    for decisions in (ahead, behind):
        assert [asked(decisions, 102), asked(decisions, 103)] == [False, True]
        decisions.save_begun()
        assert not asked(decisions, 104)
        decisions.close()


@pytest.mark.timeout(120)
def test_what_the_operator_asked_for_is_saved_whatever_was_saved_before() -> None:
    store, policy = HashStore(), EveryNSteps(100)
    behind, ahead = (Decisions(policy, TalkingRankGroup(store, rank, 2)) for rank in range(2))
    for decisions in (behind, ahead):
        decisions.start()
    assert asked(ahead, 100)
    ahead.save_begun()
    behind.wish_save("policy/0")
    assert agreed_on(behind)
    assert agreed_on(ahead)
    assert asked(behind, 100)
    behind.save_begun()
    for decisions in (behind, ahead):
        assert asked(decisions, 101)
        decisions.close()
