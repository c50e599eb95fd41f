"""Test rules of the agreement on a step that one rank can follow by itself."""

import pytest

from stepkeeper.coordination.agreement_rules import (
    STOP,
    STOP_ASKED,
    Agreed,
    Answer,
    Await,
    Conclude,
    Listen,
    Open,
    Position,
    RankView,
    kills_for,
)


@pytest.mark.parametrize(
    ("stops", "kills"),
    [([], None), ([None], None), ([STOP_ASKED], False), ([STOP], True), ([STOP_ASKED, STOP], True)],
)
def test_a_process_is_killed_for_a_stop_that_was_not_only_asked_for(
    stops: list[str | None], *, kills: bool | None
) -> None:
    assert kills_for(stops) is kills


def test_alone_a_rank_acts_at_its_next_step_on_all_that_it_wishes() -> None:
    alone = RankView(rank=0).wish("save/a").agree_alone().wish(STOP).wish(STOP).wish("save/a").agree_alone()
    assert alone.wishes == ()
    assert alone.agreed_stop == STOP
    after, due = alone.pass_step(0)
    assert due == ("save/a", STOP)
    assert (after.agreed, after.agreed_stop) == ((), None)


@pytest.mark.parametrize(("rank", "waits"), [(0, Conclude(0, Position(1, 3))), (1, Await(0))])
def test_a_round_goes_from_the_wish_to_the_latest_step_of_all(rank: int, waits: Conclude | Await) -> None:
    view, _ = RankView(rank=rank).pass_step(5)
    assert view.next_move() == Listen(0)
    assert view.receive_wish(None) == view
    assert view.wish("save/a").next_move() == Open(0, "save/a")
    held = view.receive_wish("save/a")
    assert held.is_held
    assert held.next_move() == Answer(0, Position(0, 5))
    answered = held.receive_answers((Position(0, 5), Position(1, 3)))
    assert answered.is_held
    assert answered.next_move() == waits
    agreed = answered.wish("save/a").wish("save/b").receive_conclusion(Position(1, 3))
    assert not agreed.is_held
    assert agreed.agreed == (Agreed("save/a", Position(1, 3)),)
    assert agreed.next_move() == Open(1, "save/b")


def test_a_step_below_the_last_one_is_beyond_it_and_due_only_once() -> None:
    view = RankView(rank=1, agreed=(Agreed("save/a", Position(0, 9)), Agreed("save/b", Position(1, 2))))
    before, none = view.pass_step(9)
    assert none == ()
    after, due = before.pass_step(2)
    assert due == ("save/a",)
    assert after.pass_step(3)[1] == ("save/b",)


def test_only_a_lower_step_is_a_return() -> None:
    assert [Position(1, 5).move_to(step) for step in (4, 5, 6)] == [
        Position(2, 4),
        Position(1, 5),
        Position(1, 6),
    ]
