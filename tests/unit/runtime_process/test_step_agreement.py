"""All ranks act at the same steps: what is decided after a step, and ranks as threads."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination.agreement_rules import STOP
from stepkeeper.coordination.rank_group import SoloRankGroup, StoreRankGroup
from stepkeeper.coordination.step_agreement import StepAgreement
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import NoticeDeadlineError, PeerLostError
from stepkeeper.policy.save import AnyOf, Continuous, EveryNSteps, OnPreemption
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


def test_the_step_of_a_preemption_is_one_for_the_policy() -> None:
    stop = SaveDecider(AnyOf((EveryNSteps(1000), OnPreemption())), SoloRankGroup())
    assert [stop.is_save_due(7, stopping=True), stop.is_save_due(7)] == [True, False]
    assert not SaveDecider(EveryNSteps(1000), SoloRankGroup()).is_save_due(7, stopping=True)


@pytest.mark.timeout(120)
def test_a_wish_that_a_save_has_overtaken_is_dropped_in_all_ranks() -> None:
    """Rank 1 is ahead by the step that is saved anyway: what rank 0 wishes before that is agreed on for the next."""
    store, policy, saving = HashStore(), AnyOf((EveryNSteps(100), Continuous())), False
    behind = SaveDecider(policy, StoreRankGroup(store, 0, 2), lambda: SaveConditions(saving=saving))
    ahead = SaveDecider(policy, StoreRankGroup(store, 1, 2))
    for decider in (behind, ahead):
        decider.agreement.start()
    assert asked(ahead, 100)
    ahead.on_save_started()
    assert not asked(behind, 99), "it wishes to save the next step that it can"
    assert has_agreed(behind.agreement)
    assert has_agreed(ahead.agreement)
    assert asked(behind, 100)
    behind.on_save_started()
    saving = True
    for decider in (behind, ahead):
        assert not asked(decider, 101)
    saving = False
    assert not asked(behind, 102), "it wishes the same again, after another save"
    assert has_agreed(behind.agreement)
    assert has_agreed(ahead.agreement)
    saving = True
    for decider in (ahead, behind):
        assert [asked(decider, 102), asked(decider, 103)] == [False, True]
        decider.on_save_started()
        assert not asked(decider, 104)
        decider.agreement.close(5.0)


def has_agreed(agreement: StepAgreement) -> bool:
    """Waits until this rank knows of a step for a wish."""
    with agreement._changed:
        return agreement._changed.wait_for(lambda: bool(agreement._view.agreed), 60)


def ranks_of(n_ranks: int) -> list[StepAgreement]:
    """They have begun, and share a store."""
    store = HashStore()
    agreements = [StepAgreement(StoreRankGroup(store, rank, n_ranks)) for rank in range(n_ranks)]
    for each in agreements:
        each.start()
    return agreements


def train_until_stop(agreement: StepAgreement, stride: int) -> list[tuple[int, str]]:
    """Return what the rank has acted on, each with its step."""
    acted: list[tuple[int, str]] = []
    for step in itertools.count(0, stride):
        due = agreement.pass_step(step)
        acted += [(step, name) for name in due]
        if STOP in due:
            return acted
    raise AssertionError


@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_act_at_the_same_steps(seed: int) -> None:
    chance = random.Random(seed)
    ranks, stride = ranks_of(3), chance.choice([1, 7])
    with ThreadPoolExecutor(3) as threads:
        trained = [threads.submit(train_until_stop, each, stride) for each in ranks]
        for name in ("save", "save/1", "save"):
            chance.choice(ranks).wish(name)
        for each in chance.sample(ranks, chance.randrange(1, 4)):
            each.wish(STOP)
        acted = [each.result(60) for each in trained]
    assert acted == [acted[0]] * 3
    for each in ranks:
        each.close(5.0)


def test_a_rank_trains_on_past_its_wish_to_stop_until_the_notices_time_is_over() -> None:
    waits, left_s = Waits(), [2.0, 1.0, 0.0]
    waits.notice_left_s = lambda _since_s: left_s.pop(0)
    # Not started: as where the store that the ranks talk over gives no answer.
    agreement = StepAgreement(StoreRankGroup(HashStore(), 1, 2), waits)
    agreement.wish("save/7")
    assert agreement.pass_step(1) == ()
    agreement.wish(STOP)
    assert [agreement.pass_step(step) for step in (2, 3)] == [(), ()]
    with pytest.raises(NoticeDeadlineError):
        agreement.pass_step(4)


def test_a_rank_that_is_lost_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepkeeper.coordination.step_agreement._ROUND_TIMEOUT_S", 0.05)
    store = HashStore()
    agreement = StepAgreement(StoreRankGroup(store, 0, 2))
    agreement.start()
    agreement.wish(STOP)
    StoreRankGroup(store, 1, 2).gather("agreement/met", {}, 10)
    with pytest.raises(PeerLostError):
        train_until_stop(agreement, 1)
    agreement.close(5.0)
