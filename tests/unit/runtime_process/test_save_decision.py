"""Test what is decided after a step, however often that is asked."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination.rank_group import SoloRankGroup, StoreRankGroup
from stepkeeper.policy.save import (
    AnyOf,
    Continuous,
    EveryNSteps,
    OnPreemption,
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
