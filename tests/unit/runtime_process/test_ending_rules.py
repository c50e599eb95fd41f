"""How a process ends, by the rules alone: each story is a sequence of events in the train thread."""

from collections.abc import Callable

import pytest

from stepkeeper.contract import EndKind, ExitCode
from stepkeeper.ending.machine import Ending, Move
from stepkeeper.errors import NoticeDeadlineError, PeerLostError

SAVED = Ending().reach(7).stop().on_save_finished(None)
HEARD: dict[str, Callable[[Ending], Ending]] = {
    "reach": lambda ending: ending.reach(7),
    "stop": lambda ending: ending.reach(7).stop(),
    "saved": lambda ending: ending.on_save_finished(None),
    "failed": lambda ending: ending.on_save_finished("503", may_retry=True),
    "hopeless": lambda ending: ending.on_save_finished("too late"),
    "late": lambda ending: ending.miss_deadline("too late"),
    "leave": lambda ending: ending.leave(),
    "close()": lambda ending: ending.leave(respects_stop=False),
    "end-itself": lambda ending: ending.leave(ends_itself=True),
    "met": Ending.on_ranks_met,
    "all-save-and-stop": lambda ending: ending.on_end_agreed(saves=True, stops=True),
    "all-stop": lambda ending: ending.on_end_agreed(saves=False, stops=True),
    "all-save": lambda ending: ending.on_end_agreed(saves=True, stops=False),
    "none-saves": lambda ending: ending.on_end_agreed(saves=False, stops=False),
    "end-stop": Ending.end_stop,
    "done": lambda ending: ending.close_with(0),
    "fenced": lambda ending: ending.close_with(77),
    "bug": lambda ending: ending.fail(ValueError()),
    "lost-rank": lambda ending: ending.fail(PeerLostError("rank 1")),
    "late-call": lambda ending: ending.fail(NoticeDeadlineError("late")),
    "closed": Ending.on_closed,
}
"""The events of the train thread, by name."""


@pytest.mark.parametrize(
    ("story", "moves", "kind", "code"),
    [
        pytest.param("", "", "STOPPING", None, id="training"),
        pytest.param("stop saved", "SAVE_STOP -", "SAVED", None, id="a stop that is saved"),
        pytest.param(
            "stop saved leave end-stop", "SAVE_STOP - SETTLE CLOSE", "SAVED", 75,
            id="a saved stop that is left: saves that were started after it are awaited",
        ),
        pytest.param("stop failed saved", "SAVE_STOP SAVE_STOP -", "SAVED", None, id="saved at the second try"),
        pytest.param(
            "stop failed failed failed", "SAVE_STOP SAVE_STOP SAVE_STOP -", "GAVE_UP", None,
            id="given up after three tries",
        ),
        pytest.param("stop hopeless", "SAVE_STOP -", "GAVE_UP", None, id="no try can help"),
        pytest.param(
            "late leave end-stop", "- SETTLE CLOSE", "GAVE_UP", 75, id="the time was over before the stop"
        ),
        pytest.param(
            "reach leave met failed", "- MEET SAVE_STOP CLOSE", "GAVE_UP", 75,
            id="a program that saves by itself: its save isn't tried again",
        ),
        pytest.param("reach close()", "- AGREE", "STOPPING", None, id="close() instead"),
        pytest.param(
            "end-itself all-save-and-stop failed saved", "AGREE SAVE_STOP SAVE_STOP CLOSE", "SAVED", 75,
            id="a program that ends itself",
        ),
        pytest.param(
            "end-itself all-stop failed", "AGREE SAVE_STOP CLOSE", "GAVE_UP", 75,
            id="the same, with nothing that can be saved together",
        ),
        pytest.param(
            "leave all-stop saved", "AGREE SAVE_STOP CLOSE", "SAVED", 75,
            id="another rank's program has ended itself",
        ),
        pytest.param("leave all-save done closed", "AGREE SAVE_LAST CLOSE -", "DONE", 0, id="done"),
        pytest.param("leave none-saves", "AGREE CLOSE", "DONE", 0, id="done, with nothing to save"),
        pytest.param("leave fenced", "AGREE CLOSE", "FENCED", 77, id="fenced before"),
        pytest.param(
            "stop lost-rank", "SAVE_STOP CLOSE", "PEER_LOST", 78, id="a lost rank: nothing can settle"
        ),
        pytest.param(
            "bug fenced", "SETTLE CLOSE", "FENCED", 77, id="an exception that turns out to be a fence"
        ),
        pytest.param("bug", "SETTLE", "FAILED", 1, id="an exception"),
        pytest.param("late-call", "SETTLE", "GAVE_UP", 75, id="the time was over in a call"),
    ],
)  # fmt: skip
def test_each_story_has_its_moves_and_its_end(story: str, moves: str, kind: str, code: int | None) -> None:
    ending, made = Ending(), []
    for word in story.split():
        ending = HEARD[word](ending)
        made.append("-" if ending.move is None else ending.move.name)
    meant = ExitCode.SAVED if ending.code is None else ending.code
    assert (" ".join(made), ending.kind_of(meant), ending.code) == (moves, EndKind[kind], code)


def test_a_program_that_handles_an_error_of_its_end_can_train_and_stop_again() -> None:
    ending = Ending().leave().return_to_program()
    assert (ending.move, ending.code) == (None, None)
    assert HEARD["saved"](HEARD["stop"](ending)).move is None, "it gets the thread back again"


def test_a_skip_meets_and_awaits_what_is_in_flight() -> None:
    ending = Ending(saves_at_stop=False).reach(7).stop()
    assert ending.move is Move.MEET
    ending = ending.on_ranks_met()
    assert (ending.move, ending.has_state) == (Move.SAVE_STOP, False)
    assert HEARD["failed"](ending).has_stopped


def test_a_stop_is_reached_once_and_stopped_at_once() -> None:
    assert SAVED.reach(9) == SAVED
    assert SAVED.choice is None
    chosen = Ending().reach(7).stop().on_save_finished("503", may_retry=True, choice="at step 7, both")
    assert chosen.on_save_finished(None).choice == "at step 7, both"
