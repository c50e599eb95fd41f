"""Test which steps a policy saves."""

from collections.abc import Callable

import pytest

from stepkeeper.contract import ContractError, Interval, IntervalType
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

DAY_S = 86400.0
CHEAP = SaveCost(stall_s=0.05, duration_s=10.0)
NOW = Moment(step=7, since_save_s=100.0, saving=False, cost=CHEAP)
"""A hundred seconds after the last save, which took ten."""


@pytest.mark.parametrize(
    ("policy", "moment", "due"),
    [
        (EveryNSteps(4), Moment(step=8), True),
        (EveryNSteps(4), Moment(step=9), False),
        (AtSteps((3, 9)), Moment(step=9), True),
        (AtSteps((3, 9)), Moment(step=4), False),
        (EverySeconds(2.0), Moment(step=7, since_save_s=1.9), False),
        (EverySeconds(2.0), Moment(step=7, since_save_s=2.0), True),
        (Continuous(), Moment(step=7, saving=True, since_save_s=100.0), False),
        (Continuous(), Moment(step=7, saving=False), True),
        (Continuous(minimum_s=5.0), Moment(step=7, saving=False, since_save_s=5.0), True),
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


@pytest.mark.parametrize("policy", [EverySeconds(1e-9), Continuous(), Auto(least_s=1e-9)])
def test_without_clocks_and_saves_only_steps_decide(policy: SavePolicy) -> None:
    """Check the answer that every rank comes to by itself."""
    assert not policy.due(Moment(step=0))


def test_settings_become_policies() -> None:
    assert from_interval(Interval(steps=3)) == EveryNSteps(3)
    assert from_interval(Interval(seconds=3)) == EverySeconds(3)
    assert from_interval(Interval(steps=3, seconds=9)) == AnyOf((EveryNSteps(3), EverySeconds(9)))
    assert from_interval(Interval(type=IntervalType.CONTINUOUS)) == Continuous()
    assert from_interval(Interval(type=IntervalType.CONTINUOUS, seconds=9)) == Continuous(minimum_s=9)
    assert from_interval(Interval(type=IntervalType.AUTO)) == Auto()
    assert from_interval(Interval(type=IntervalType.AUTO, seconds=900)) == Auto(most_s=900)
    assert from_interval(Interval(type=IntervalType.AUTO, seconds=9)) == Auto(least_s=9, most_s=9)
    with pytest.raises(ContractError, match="Auto has no steps"):
        Interval(type=IntervalType.AUTO, steps=3)


def lost_share(interval_s: float, cost_s: float, between_s: float) -> float:
    """Compute what a training loses to saves, and to steps done again, which are half an interval's in the mean."""
    return cost_s / interval_s + interval_s / 2 / between_s


@pytest.mark.parametrize("cost_s", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("between_s", [3600.0, DAY_S, 30 * DAY_S])
def test_auto_loses_least(cost_s: float, between_s: float) -> None:
    policy = Auto(least_s=0.1, most_s=1e9, assumed_between_s=between_s, background_share=0.0)
    chosen_s = policy.interval_s(SaveCost(stall_s=cost_s, duration_s=0.0), Disruptions())
    best = min(lost_share(chosen_s * factor, cost_s, between_s) for factor in (0.5, 0.7, 1.0, 1.4, 2.0))
    assert lost_share(chosen_s, cost_s, between_s) <= best * 1.01


def test_auto_saves_sooner_where_disruptions_are_known() -> None:
    policy = Auto(least_s=1.0, most_s=1e6)
    calm = policy.interval_s(CHEAP, Disruptions(count=0, over_s=10 * DAY_S))
    unknown = policy.interval_s(CHEAP, Disruptions())
    often = policy.interval_s(CHEAP, Disruptions(count=20, over_s=DAY_S))
    assert often < unknown < calm


def test_auto_keeps_its_bounds_and_lets_a_save_end() -> None:
    dear, free = SaveCost(stall_s=600.0, duration_s=700.0), SaveCost(stall_s=0.0, duration_s=0.0)
    policy = Auto(least_s=30.0, most_s=900.0)
    assert policy.interval_s(dear, Disruptions()) == 900.0
    assert policy.interval_s(free, Disruptions()) == 30.0
    assert policy.interval_s(SaveCost(stall_s=0.0, duration_s=500.0), Disruptions(count=9**9)) == 500.0
    hopeless = SaveCost(stall_s=3 * DAY_S, duration_s=3 * DAY_S)
    assert Auto(most_s=9 * DAY_S).interval_s(hopeless, Disruptions()) == 3 * DAY_S


@pytest.mark.parametrize(
    "make",
    [
        lambda: EveryNSteps(0),
        lambda: EverySeconds(float("nan")),
        lambda: Continuous(-1.0),
        lambda: Auto(least_s=10.0, most_s=9.0),
        lambda: Auto(background_share=1.5),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], SavePolicy]) -> None:
    with pytest.raises(ValueError, match=r"save interval|least time|Auto"):
        make()
