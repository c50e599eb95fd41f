"""Test what is decided after a step, however often that is asked."""

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
from stepkeeper.training.save_decision import SaveConditions, SaveDecider


def asked(decider: SaveDecider, step: int) -> bool:
    decider.should_stop_at(step)
    return decider.is_save_due(step)


def test_a_save_that_was_asked_for_is_due_at_its_step_until_it_is_begun() -> None:
    decider = SaveDecider(EveryNSteps(1000), SoloRankGroup())
    assert not asked(decider, 1)
    decider.request_save("request-1")
    assert [asked(decider, 2), asked(decider, 2)] == [True, True]
    decider.on_save_started()
    decider.request_save("request-1")
    assert [asked(decider, 2), asked(decider, 3)] == [False, False]


def test_a_save_that_was_asked_for_is_not_due_at_a_later_step() -> None:
    decider = SaveDecider(EveryNSteps(1000), SoloRankGroup())
    decider.request_save("request-1")
    assert [asked(decider, 2), asked(decider, 3)] == [True, False]


@pytest.mark.timeout(120)
def test_what_several_hosts_ask_for_one_after_the_other_is_one_save() -> None:
    store, policy = HashStore(), EveryNSteps(1000)
    first, second = (SaveDecider(policy, TalkingRankGroup(store, rank, 2)) for rank in range(2))
    for decider in (first, second):
        decider.start()
    assert first.request_save("maintenance/7")
    assert agreed_on(first)
    assert agreed_on(second)
    # It hears of it before it has come to that step, and again after it.
    assert not second.request_save("maintenance/7")
    saved = [[step for step in (1, 2) if asked(decider, step)] for decider in (first, second)]
    assert saved == [[1], [1]]
    for decider in (first, second):
        decider.on_save_started()
        assert not decider.request_save("maintenance/7")
        assert not asked(decider, 3)
        decider.close(5.0)


def test_a_save_may_still_be_asked_for_where_the_stop_is_not_heeded() -> None:
    decider = SaveDecider(EveryNSteps(1000), SoloRankGroup())
    decider.request_stop()
    assert decider.should_stop_at(4)
    decider.request_save("request-1")
    assert asked(decider, 5)
    assert decider.stop_step == 4


def test_rank_0_alone_goes_by_what_it_sees() -> None:
    saving = True
    decider = SaveDecider(Continuous(), SoloRankGroup(), lambda: SaveConditions(saving=saving))
    assert not asked(decider, 1)
    saving = False
    assert [asked(decider, 2), asked(decider, 2), asked(decider, 3)] == [True] * 3


def test_the_policy_is_told_all_that_is_known() -> None:
    told: list[Moment] = []

    class Noting:
        def due(self, moment: Moment) -> bool:
            told.append(moment)
            return False

    cost, disruptions = SaveCost(stall_s=1.0, duration_s=2.0), Disruptions(count=3, over_s=4.0)
    decider = SaveDecider(
        Noting(), SoloRankGroup(), lambda: SaveConditions(saving=False, cost=cost, disruptions=disruptions)
    )
    assert not asked(decider, 7)
    known_by_all, known_by_one = told
    assert known_by_all == Moment(step=7)
    assert (known_by_one.step, known_by_one.saving) == (7, False)
    assert (known_by_one.cost, known_by_one.disruptions) == (cost, disruptions)
    assert known_by_one.since_save_s > 0


def test_the_step_of_a_preemption_is_one_for_the_policy() -> None:
    stop = SaveDecider(AnyOf((EveryNSteps(1000), OnPreemption())), SoloRankGroup())
    assert [stop.is_save_due(7, stopping=True), stop.is_save_due(7)] == [True, False]
    assert not SaveDecider(EveryNSteps(1000), SoloRankGroup()).is_save_due(7, stopping=True)


class TalkingRankGroup(StoreRankGroup):
    """Counts what goes through the store."""

    n_asked = 0

    def read_proposal(self, name: str, *, within_s: float | None = None) -> dict[str, Any] | None:  # type: ignore[explicit-override]  # Python 3.11 has none
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
            SaveDecider(policy, TalkingRankGroup(store, rank, world_size)) for rank in range(world_size)
        ]
        self.ranks[0]._read_conditions = lambda: SaveConditions(saving=False)

    def run(self, enough: Callable[[list[int]], bool]) -> None:
        """Until rank 0 has saved `enough`, and all have stopped at one step."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            running = [pool.submit(self._train, rank, enough) for rank in range(len(self.ranks))]
            for each in running:
                each.result()
        for decider in self.ranks:
            decider.close(5.0)

    def _train(self, rank: int, enough: Callable[[list[int]], bool]) -> None:
        decider, saved = self.ranks[rank], self.saved[rank]
        decider.start()
        for step in range(1, 10**6):
            with self.moved:
                while step > min(self.steps) + self.lead:
                    assert self.moved.wait(60), "a rank is stuck"
                self.steps[rank] = step
                self.moved.notify_all()
            if decider.should_stop_at(step):
                return
            if decider.is_save_due(step):
                saved.append(step)
                decider.on_save_started()
                if rank == 0 and enough(saved):
                    decider.request_stop()


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


def agreed_on(decider: SaveDecider) -> bool:
    """Waits until this rank knows of a step for a wish."""
    agreement = decider._agreement
    with agreement._changed:
        return agreement._changed.wait_for(lambda: bool(agreement._view.agreed), 60)


@pytest.mark.timeout(120)
def test_a_wish_that_a_save_has_overtaken_is_dropped_in_all_ranks() -> None:
    """Rank 1 is ahead by the step that is saved anyway: what rank 0 wishes before that is agreed on for the next."""
    store, policy, saving = HashStore(), AnyOf((EveryNSteps(100), Continuous())), False
    behind = SaveDecider(policy, TalkingRankGroup(store, 0, 2), lambda: SaveConditions(saving=saving))
    ahead = SaveDecider(policy, TalkingRankGroup(store, 1, 2))
    for decider in (behind, ahead):
        decider.start()
    assert asked(ahead, 100)
    ahead.on_save_started()
    assert not asked(behind, 99), "it wishes to save the next step that it can"
    assert agreed_on(behind)
    assert agreed_on(ahead)
    assert asked(behind, 100)
    behind.on_save_started()
    saving = True
    for decider in (behind, ahead):
        assert not asked(decider, 101)
    saving = False
    assert not asked(behind, 102), "it wishes the same again, after another save"
    assert agreed_on(behind)
    assert agreed_on(ahead)
    saving = True
    for decider in (ahead, behind):
        assert [asked(decider, 102), asked(decider, 103)] == [False, True]
        decider.on_save_started()
        assert not asked(decider, 104)
        decider.close(5.0)


@pytest.mark.timeout(120)
def test_what_the_operator_asked_for_is_saved_whatever_was_saved_before() -> None:
    store, policy = HashStore(), EveryNSteps(100)
    behind, ahead = (SaveDecider(policy, TalkingRankGroup(store, rank, 2)) for rank in range(2))
    for decider in (behind, ahead):
        decider.start()
    assert asked(ahead, 100)
    ahead.on_save_started()
    behind.request_save("policy/0")
    assert agreed_on(behind)
    assert agreed_on(ahead)
    assert asked(behind, 100)
    behind.on_save_started()
    for decider in (behind, ahead):
        assert asked(decider, 101)
        decider.close(5.0)


def test_a_stop_that_is_asked_for_is_told_from_one_that_a_process_is_killed_for() -> None:
    decider = SaveDecider(EveryNSteps(1000), SoloRankGroup())
    assert decider.kills is None
    decider.request_stop(asked=True)
    assert [decider.kills, decider.should_stop_at(1), decider.kills] == [False, True, False]
    killed = SaveDecider(EveryNSteps(1000), SoloRankGroup())
    killed.request_stop(asked=True)
    killed.request_stop()
    assert [killed.kills, killed.should_stop_at(1), killed.kills] == [True, True, True]
