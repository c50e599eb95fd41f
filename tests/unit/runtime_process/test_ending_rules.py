"""How a process ends, by the rules alone: each story is a sequence of what the train thread hears."""

from collections.abc import Callable

import pytest

from stepkeeper.contract import EndKind, ExitCode
from stepkeeper.ending.machine import Ending, Move
from stepkeeper.errors import NoticeDeadlineError, PeerLostError

Change = Callable[[Ending], Ending]


def saved(ending: Ending) -> Ending:
    return ending.hear_save(None)


def failed(ending: Ending) -> Ending:
    return ending.hear_save("503", may_retry=True)


def stop(ending: Ending) -> Ending:
    return ending.reach(7).stop()


def leave(ending: Ending) -> Ending:
    return ending.leave()


def done(ending: Ending) -> Ending:
    return ending.close_with(0)


def end_itself(ending: Ending) -> Ending:
    return ending.leave(ends_itself=True)


@pytest.mark.parametrize(
    ("story", "moves", "kind", "code"),
    [
        pytest.param([], [], EndKind.STOPPING, None, id="training"),
        pytest.param([stop, saved], [Move.SAVE_STOP, None], EndKind.SAVED, None, id="a stop that is saved"),
        pytest.param(
            [stop, saved, leave, Ending.end_stop],
            [Move.SAVE_STOP, None, Move.SETTLE, Move.CLOSE],
            EndKind.SAVED,
            75,
            id="a saved stop that is left: saves that were started after it are awaited",
        ),
        pytest.param(
            [stop, failed, saved],
            [Move.SAVE_STOP, Move.SAVE_STOP, None],
            EndKind.SAVED,
            None,
            id="saved at the second try",
        ),
        pytest.param(
            [stop, failed, failed, failed],
            [Move.SAVE_STOP] * 3 + [None],
            EndKind.GAVE_UP,
            None,
            id="given up after three tries",
        ),
        pytest.param(
            [stop, lambda ending: ending.hear_save("too late")],
            [Move.SAVE_STOP, None],
            EndKind.GAVE_UP,
            None,
            id="no try can help",
        ),
        pytest.param(
            [lambda ending: ending.miss_deadline("too late"), leave, Ending.end_stop],
            [None, Move.SETTLE, Move.CLOSE],
            EndKind.GAVE_UP,
            75,
            id="the time was over before the stop",
        ),
        pytest.param(
            [lambda ending: ending.reach(7), leave, Ending.hear_met, failed],
            [None, Move.MEET, Move.SAVE_STOP, Move.CLOSE],
            EndKind.GAVE_UP,
            75,
            id="a program that saves by itself: its save isn't tried again",
        ),
        pytest.param(
            [lambda ending: ending.reach(7), lambda ending: ending.leave(heeds_stop=False)],
            [None, Move.AGREE],
            EndKind.STOPPING,
            None,
            id="close() instead",
        ),
        pytest.param(
            [end_itself, lambda ending: ending.hear_end(saves=True, stops=True), failed, saved],
            [Move.AGREE, Move.SAVE_STOP, Move.SAVE_STOP, Move.CLOSE],
            EndKind.SAVED,
            75,
            id="a program that ends itself",
        ),
        pytest.param(
            [end_itself, lambda ending: ending.hear_end(saves=False, stops=True), failed],
            [Move.AGREE, Move.SAVE_STOP, Move.CLOSE],
            EndKind.GAVE_UP,
            75,
            id="the same, with nothing that can be saved together",
        ),
        pytest.param(
            [leave, lambda ending: ending.hear_end(saves=False, stops=True), saved],
            [Move.AGREE, Move.SAVE_STOP, Move.CLOSE],
            EndKind.SAVED,
            75,
            id="another rank's program has ended itself",
        ),
        pytest.param(
            [
                leave,
                lambda ending: ending.hear_end(saves=True, stops=False),
                done,
                Ending.hear_closed,
            ],
            [Move.AGREE, Move.SAVE_LAST, Move.CLOSE, None],
            EndKind.DONE,
            0,
            id="done",
        ),
        pytest.param(
            [leave, lambda ending: ending.hear_end(saves=False, stops=False)],
            [Move.AGREE, Move.CLOSE],
            EndKind.DONE,
            0,
            id="done, with nothing to save",
        ),
        pytest.param(
            [leave, lambda ending: ending.close_with(77)],
            [Move.AGREE, Move.CLOSE],
            EndKind.FENCED,
            77,
            id="fenced before",
        ),
        pytest.param(
            [stop, lambda ending: ending.fail(PeerLostError("rank 1"))],
            [Move.SAVE_STOP, Move.CLOSE],
            EndKind.PEER_LOST,
            78,
            id="a lost rank: nothing can settle",
        ),
        pytest.param(
            [
                lambda ending: ending.fail(ValueError()),
                lambda ending: ending.close_with(77),
            ],
            [Move.SETTLE, Move.CLOSE],
            EndKind.FENCED,
            77,
            id="an exception that turns out to be a fence",
        ),
        pytest.param(
            [lambda ending: ending.fail(NoticeDeadlineError("late"))],
            [Move.SETTLE],
            EndKind.GAVE_UP,
            75,
            id="the time was over in a call",
        ),
    ],
)
def test_each_story_has_its_moves_and_its_end(
    story: list[Change], moves: list[Move | None], kind: EndKind, code: int | None
) -> None:
    ending, made = Ending(), []
    for change in story:
        ending = change(ending)
        made.append(ending.move)
    meant = ExitCode.SAVED if ending.code is None else ending.code
    assert (made, ending.kind_of(meant), ending.code) == (moves, kind, code)


def test_a_program_that_handles_an_error_of_its_end_can_train_and_stop_again() -> None:
    ending = leave(Ending()).return_to_program()
    assert (ending.move, ending.code) == (None, None)
    assert saved(stop(ending)).move is None, "it gets the thread back again"


def test_a_skip_meets_and_awaits_what_is_in_flight() -> None:
    ending = stop(Ending(saves_at_stop=False))
    assert ending.move is Move.MEET
    ending = ending.hear_met()
    assert (ending.move, ending.has_state) == (Move.SAVE_STOP, False)
    assert failed(ending).has_stopped


def test_a_stop_is_reached_once_and_stopped_at_once() -> None:
    stopped = saved(stop(Ending()))
    assert stopped.reach(9) == stopped
    assert saved(stop(Ending())).choice is None
    chosen = stop(Ending()).hear_save("503", may_retry=True, choice="at step 7, both")
    assert saved(chosen).choice == "at step 7, both"


@pytest.mark.parametrize(
    ("ending", "code", "kind"),
    [
        (Ending(), ExitCode.SAVED, EndKind.STOPPING),
        (saved(stop(Ending())), ExitCode.SAVED, EndKind.SAVED),
        (Ending().miss_deadline("late"), ExitCode.SAVED, EndKind.GAVE_UP),
        (Ending(), ExitCode.DONE, EndKind.DONE),
        (Ending(), ExitCode.FENCED, EndKind.FENCED),
        (Ending(), ExitCode.PEER_LOST, EndKind.PEER_LOST),
        (Ending(), 1, EndKind.FAILED),
    ],
)
def test_the_message_has_a_kind(ending: Ending, code: int, kind: EndKind) -> None:
    assert ending.kind_of(code) is kind
