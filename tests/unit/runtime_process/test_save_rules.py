"""Which steps are saved: by the policy, for a notice, and at the end."""

import threading
from typing import cast

import pytest

from stepkeeper.companion.messages import Committed
from stepkeeper.contract import (
    AutoInterval,
    ContinuousInterval,
    ContractError,
    EndKind,
    EveryInterval,
    ExitCode,
    Interval,
)
from stepkeeper.coordination.root_check import RootProof
from stepkeeper.ending.machine import Ending
from stepkeeper.errors import SaveError
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
from stepkeeper_testing.saves import record_of, saver_with, shell_of

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


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Saver]:
    found: list[Saver] = []

    def start_save(saves: Saver, request: SaveRequest, _timeout_s: float) -> None:
        assert request.is_last
        found.append(saves)

    monkeypatch.setattr(Saver, "start_save", start_save)
    return found


def saver_after(state: SaveState) -> Saver:
    """Make a saver whose newest save, of step 7, has come so far."""
    saves = saver_with()
    newest = saves._newest_save = InFlight(7)
    newest.state = state
    if state is SaveState.FAILED:
        newest.future.set_exception(SaveError("503"))
    elif state is SaveState.COMMITTED:
        committed = Committed(record=record_of(7), uri="memory://root/7")
        newest.end_save(committed, None)
        newest.future.set_result(committed)
    return saves


def stop(saves: Saver, step: int, left_s: float = 30.0) -> Ending:
    ending = shell_of(saves, step, left_s=left_s)._make(Ending().reach(step).stop())
    saves.close()
    return ending


@pytest.mark.parametrize(
    ("step", "state", "starts"),
    [
        (7, SaveState.COMMITTED, False),
        (7, SaveState.FAILED, True),
        (8, SaveState.COMMITTED, True),
        (8, SaveState.FAILED, True),
    ],
)
def test_a_stop_saves_its_step_unless_that_is_committed(
    begun: list[Saver], step: int, state: SaveState, starts: bool
) -> None:
    saves = saver_after(state)
    stop(saves, step)
    assert begun == [saves] * starts


@pytest.mark.parametrize("step", [7, 8])
def test_a_save_in_flight_ends_before_another_one_takes_its_bandwidth(begun: list[Saver], step: int) -> None:
    saves = saver_after(SaveState.COMMITTING)
    newest = saves.newest_save
    assert newest is not None
    stopping = threading.Thread(target=stop, args=(saves, step))
    stopping.start()
    assert not begun
    newest.future.set_exception(SaveError("503"))
    stopping.join(60)
    assert begun == [saves], "also of the same step, whose failure this rank didn't know of yet"


def test_a_save_in_flight_may_take_all_the_time(begun: list[Saver]) -> None:
    ending = stop(saver_after(SaveState.COMMITTING), 8, left_s=0.1)
    assert ending.kind_of(ExitCode.SAVED) is EndKind.GAVE_UP
    assert not begun, "what takes seconds must not begin when the time is over"


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
    ending = shell_of(saves, 1, left_s=0.1)._make(ending)
    assert ending.kind_of(ExitCode.SAVED) is EndKind.GAVE_UP
    assert not answer.is_set()
    late.cancel()
    answer.set()
    assert saves.newest_save is None
    assert "no answer for 0.1 s from the root" in caplog.text
    saves.close()
