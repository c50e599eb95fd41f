"""Which steps are saved: by the policy, for a notice, and at the end."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.contract import (
    AutoInterval,
    ContinuousInterval,
    ContractError,
    EndKind,
    EveryInterval,
    ExitCode,
    Interval,
)
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.coordination.root_check import RootProof
from stepkeeper.ending.choices import NewestSave, choose_stop_save
from stepkeeper.ending.machine import Ending
from stepkeeper.ending.moves import Moves
from stepkeeper.policy.save import (
    AnyOf,
    AtSteps,
    Auto,
    Continuous,
    Disruptions,
    EveryNSteps,
    EverySeconds,
    Moment,
    OnPreemption,
    SaveCost,
    SavePolicy,
    from_interval,
)
from stepkeeper.save.given_state import SaveRequest
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.report import SaveState
from stepkeeper.save.saver import Saver
from stepkeeper_testing.saves import moves_of, saver_with

DAY_S = 86400.0


CHEAP = SaveCost(stall_s=0.05, duration_s=10.0)


@pytest.mark.parametrize(
    ("policy", "moment", "due"),
    [
        (EveryNSteps(4), Moment(step=8), True),
        (EveryNSteps(4), Moment(step=9), False),
        (AtSteps((3, 9)), Moment(step=9), True),
        (AtSteps((3, 9)), Moment(step=4), False),
        (AtSteps([3, 9]), Moment(step=9), True),  # type: ignore[arg-type]  # lists are taken too
        (EverySeconds(2.0), Moment(step=7, since_save_s=1.9), False),
        (EverySeconds(2.0), Moment(step=7, since_save_s=2.0), True),
        (Continuous(), Moment(step=7, saving=True, since_save_s=100.0), False),
        (Continuous(), Moment(step=7, saving=False), True),
        (Continuous(min_s=5.0), Moment(step=7, saving=False, since_save_s=5.0), True),
        (OnPreemption(), Moment(step=7, stopping=True), True),
        (OnPreemption(), Moment(step=7, saving=False, since_save_s=1e9), False),
        (Auto(), Moment(step=7, since_save_s=61.0, saving=False), True),
        (Auto(), Moment(step=7, since_save_s=59.0, saving=False), False),
        (Auto(), Moment(step=7, since_save_s=1e9, saving=True, cost=CHEAP), False),
        (AnyOf((EveryNSteps(10), EverySeconds(5.0))), Moment(step=10), True),
        (AnyOf((EveryNSteps(10), EverySeconds(5.0))), Moment(step=11, since_save_s=5.0), True),
    ],
)
def test_truth_table(policy: SavePolicy, moment: Moment, due: bool) -> None:
    assert policy.due(moment) is due


def test_settings_become_policies() -> None:
    assert from_interval(Interval(every=EveryInterval(steps=3))) == EveryNSteps(3)
    assert from_interval(Interval(every=EveryInterval(seconds=3))) == EverySeconds(3)
    assert from_interval(Interval(every=EveryInterval(steps=3, seconds=9))) == AnyOf(
        (EveryNSteps(3), EverySeconds(9))
    )
    assert from_interval(Interval(continuous=ContinuousInterval())) == Continuous()
    assert from_interval(Interval(continuous=ContinuousInterval(min_seconds=9))) == Continuous(min_s=9)
    assert from_interval(Interval(auto=AutoInterval())) == Auto()
    assert from_interval(Interval(auto=AutoInterval(max_seconds=900))) == Auto(max_s=900)
    assert from_interval(Interval(auto=AutoInterval(max_seconds=9))) == Auto(min_s=9, max_s=9)
    with pytest.raises(ContractError, match="exactly one of every"):
        Interval(auto=AutoInterval(), every=EveryInterval(steps=3))


def lost_share(interval_s: float, cost_s: float, between_s: float) -> float:
    """Compute what a training loses to saves, and to steps done again, which are half an interval's in the mean."""
    return cost_s / interval_s + interval_s / 2 / between_s


@pytest.mark.parametrize("cost_s", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("between_s", [3600.0, DAY_S, 30 * DAY_S])
def test_auto_loses_least(cost_s: float, between_s: float) -> None:
    policy = Auto(min_s=0.1, max_s=1e9, assumed_between_s=between_s, background_share=0.0)
    chosen_s = policy.interval_s(SaveCost(stall_s=cost_s, duration_s=0.0), Disruptions())
    best = min(lost_share(chosen_s * factor, cost_s, between_s) for factor in (0.5, 0.7, 1.0, 1.4, 2.0))
    assert lost_share(chosen_s, cost_s, between_s) <= best * 1.01


def test_auto_saves_sooner_where_disruptions_are_known() -> None:
    policy = Auto(min_s=1.0, max_s=1e6)
    calm = policy.interval_s(CHEAP, Disruptions(count=0, over_s=10 * DAY_S))
    unknown = policy.interval_s(CHEAP, Disruptions())
    often = policy.interval_s(CHEAP, Disruptions(count=20, over_s=DAY_S))
    assert often < unknown < calm


def test_auto_keeps_its_bounds_and_lets_a_save_end() -> None:
    dear, free = SaveCost(stall_s=600.0, duration_s=700.0), SaveCost(stall_s=0.0, duration_s=0.0)
    policy = Auto(min_s=30.0, max_s=900.0)
    assert policy.interval_s(dear, Disruptions()) == 900.0
    assert policy.interval_s(free, Disruptions()) == 30.0
    assert policy.interval_s(SaveCost(stall_s=0.0, duration_s=500.0), Disruptions(count=9**9)) == 500.0
    hopeless = SaveCost(stall_s=3 * DAY_S, duration_s=3 * DAY_S)
    assert Auto(max_s=9 * DAY_S).interval_s(hopeless, Disruptions()) == 3 * DAY_S


WORLD_SIZE = 3


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Saver]:
    found: list[Saver] = []

    def start_save(saves: Saver, request: SaveRequest, _timeout_s: float) -> None:
        assert request.is_last
        found.append(saves)

    monkeypatch.setattr(Saver, "start_save", start_save)
    monkeypatch.setattr(Moves, "_await_newest", lambda _: None)
    return found


def ranks_in(states: list[SaveState]) -> list[Saver]:
    """One rank each, whose last save, of step 7, has come so far as it knows."""
    store = HashStore()
    ranks = []
    for rank, state in enumerate(states):
        rank_group = StoreRankGroup(store, rank, len(states))
        saves = saver_with(rank_group=rank_group)
        saves._newest_save = InFlight(7)
        saves._newest_save.state = state
        ranks.append(saves)
    return ranks


def notice(ranks: list[Saver], step: int, timeout_s: float) -> None:
    def begin(rank: Saver) -> None:
        moves_of(rank, step, left_s=timeout_s).make(Ending().reach(step).stop())

    with ThreadPoolExecutor(len(ranks)) as threads:
        for done in [threads.submit(begin, each) for each in ranks]:
            done.result(60)
    for each in ranks:
        each.close()


@pytest.mark.parametrize("knows", range(WORLD_SIZE))
def test_a_failure_that_one_rank_knows_of_first_is_made_good_by_all(knows: int, begun: list[Saver]) -> None:
    states = [SaveState.COMMITTING] * WORLD_SIZE
    states[knows] = SaveState.FAILED
    ranks = ranks_in(states)
    notice(ranks, 7, 30)
    assert set(begun) == set(ranks)


@pytest.mark.parametrize(
    ("step", "states", "starts"),
    [
        (8, [SaveState.FAILED, SaveState.COMMITTED], True),
        # The save of step 7 has just begun, and saves take 20 s.
        (8, [SaveState.COMMITTED, SaveState.COMMITTING], False),
        (7, [SaveState.COMMITTED, SaveState.COMMITTING], False),
    ],
)
def test_another_step_is_added_by_all_or_by_none(
    begun: list[Saver], step: int, states: list[SaveState], starts: bool
) -> None:
    ranks = ranks_in(states)
    ranks[0]._recent_costs.cost = SaveCost(stall_s=0.1, duration_s=20.0)
    for each in ranks:
        assert each.newest_save is not None
        if each.newest_save.state is not SaveState.COMMITTING:
            each.newest_save.future.cancel()
    notice(ranks, step, 30)
    assert set(begun) == (set(ranks) if starts else set())


def standing(in_flight_s: float | None, left_s: float | None, **more: bool) -> NewestSave:
    return NewestSave(
        is_of_stop=more.get("is_of_stop", False),
        failed=more.get("failed", False),
        in_flight_s=in_flight_s,
        left_s=left_s,
    )


@pytest.mark.parametrize(
    ("ranks", "cost_s", "starts", "why"),
    [
        ([standing(None, 10.0)], 60.0, True, None),
        ([standing(3.0, None)], 60.0, True, None),
        ([standing(3.0, 10.0)], None, True, "no save was measured before"),
        (
            [standing(3.0, 10.0)],
            5.0,
            True,
            "10.0 s are left, the save in flight needs about 2.0 s more, and one more",
        ),
        ([standing(3.0, 6.9)], 5.0, False, "only the one in flight is finished"),
        # The one that began last, and the one that is killed first, decide.
        ([standing(3.0, 10.0), standing(1.0, 20.0), standing(None, 8.9)], 5.0, False, "8.9 s are left"),
        ([standing(9.0, 5.0)], 5.0, True, "needs about 0.0 s more"),
    ],
)
def test_a_save_is_added_if_there_is_time_for_both(
    ranks: list[NewestSave], cost_s: float | None, starts: bool, why: str | None
) -> None:
    choice = choose_stop_save(ranks, cost_s, again=False)
    assert choice.starts is starts
    assert choice.why == why if why is None or choice.why is None else why in choice.why


@pytest.mark.parametrize(
    ("left_s", "cost_s", "starts"),
    [(9.0, 10.0, False), (11.0, 10.0, True), (9.0, None, True), (None, 10.0, True)],
)
def test_what_failed_is_saved_once_more_where_time_is_left(
    left_s: float | None, cost_s: float | None, starts: bool
) -> None:
    failed = NewestSave(is_of_stop=True, failed=True, in_flight_s=None, left_s=left_s)
    assert choose_stop_save([failed, replace(failed, left_s=60.0)], cost_s, again=True).starts is starts


class Proof:
    """Of a root that gives no answer while it is `silent`."""

    made = False

    def __init__(self, silent: threading.Event) -> None:
        self.silent = silent

    def make(self) -> None:
        self.silent.wait(60)


def test_a_root_that_gives_no_answer_does_not_take_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    answer = threading.Event()
    saves = saver_with()
    saves._proof = cast(RootProof, Proof(answer))
    late = threading.Timer(3, answer.set)
    late.start()
    ending = Ending().reach(1).stop()
    ending = moves_of(saves, 1, left_s=0.1).make(ending)(ending)
    assert ending.kind_of(ExitCode.SAVED) is EndKind.GAVE_UP
    assert not answer.is_set()
    late.cancel()
    answer.set()
    assert saves.newest_save is None
    assert "no answer for 0.1 s from the root" in caplog.text
    saves.close()


def test_where_a_rank_does_not_answer_none_begins_alone(begun: list[Saver]) -> None:
    ranks = ranks_in([SaveState.FAILED, SaveState.FAILED])
    notice(ranks[1:], 7, 0.1)
    assert not begun
