"""What is to be done after a step, however often it is asked."""

from stepkeeper.decisions import Decisions
from stepkeeper.gang import SoloGang
from stepkeeper.policy.save import EveryNSteps


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
