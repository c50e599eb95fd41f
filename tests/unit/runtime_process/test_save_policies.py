"""When a step is to be saved."""

import pytest

from stepkeeper.contract import Interval
from stepkeeper.policy import AnyOf, AtStep, EveryNSteps, EverySeconds, from_interval


def test_steps_are_multiples() -> None:
    assert [step for step in range(10) if EveryNSteps(4).due(step, 0.0)] == [0, 4, 8]


def test_seconds_count_from_the_last_save() -> None:
    assert not EverySeconds(2.0).due(7, 1.9)
    assert EverySeconds(2.0).due(7, 2.0)


def test_any_of_is_whichever_comes_first() -> None:
    policy = AnyOf((EveryNSteps(10), EverySeconds(5.0)))
    assert [policy.due(10, 0.0), policy.due(11, 5.0), policy.due(11, 4.0)] == [True, True, False]


def test_settings_become_policies() -> None:
    assert from_interval(Interval(steps=3)) == EveryNSteps(3)
    assert from_interval(Interval(seconds=3)) == EverySeconds(3)
    assert from_interval(Interval(steps=3, seconds=9)) == AnyOf((EveryNSteps(3), EverySeconds(9)))


def test_the_last_step_is_saved_whatever_the_interval() -> None:
    policy = from_interval(Interval(steps=4), total_steps=10)
    assert policy == AnyOf((EveryNSteps(4), AtStep(10)))
    assert [step for step in range(1, 11) if policy.due(step, 0.0)] == [4, 8, 10]


@pytest.mark.parametrize("make", [lambda: EveryNSteps(0), lambda: EverySeconds(0.0)])
def test_an_interval_of_nothing_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match="save interval"):
        make()
