"""How a process ends, by the rules alone, and how much time a notice leaves to each part of that."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from stepkeeper.contract import EndKind, ExitCode, NoticeSource
from stepkeeper.ending.machine import EndChoice, Ending, Move
from stepkeeper.ending.notices import Notices
from stepkeeper.ending.schedule import END_WAIT_S, ENDS_APART_S, Notice, Schedule, launcher_grace_s
from stepkeeper.errors import NoticeDeadlineError, PeerLostError

SAVED = Ending().reach(7).stop().on_stop_tried(None)
HEARD: dict[str, Callable[[Ending], Ending]] = {
    "reach": lambda ending: ending.reach(7),
    "stop": lambda ending: ending.reach(7).stop(),
    "saved": lambda ending: ending.on_stop_tried(None),
    "failed": lambda ending: ending.on_stop_tried("503", may_retry=True),
    "hopeless": lambda ending: ending.on_stop_tried("too late"),
    "leave": lambda ending: ending.leave(),
    "close()": lambda ending: ending.leave(respects_stop=False),
    "end-itself": lambda ending: ending.leave(ends_itself=True),
    "all-save-and-stop": lambda ending: ending.on_end_agreed(EndChoice(step=7, stops=True)),
    "all-stop": lambda ending: ending.on_end_agreed(EndChoice(step=None, stops=True)),
    "all-lose-and-stop": lambda ending: ending.on_end_agreed(EndChoice(step=7, stops=True, loss="changed")),
    "all-save": lambda ending: ending.on_end_agreed(EndChoice(step=7, stops=False)),
    "none-saves": lambda ending: ending.on_end_agreed(EndChoice(step=None, stops=False)),
    "all-lose": lambda ending: ending.on_end_agreed(EndChoice(step=7, stops=False, loss="changed")),
    "done": lambda ending: ending.close_with(0),
    "fenced": lambda ending: ending.close_with(77),
    "bug": lambda ending: ending.close_with(1),
    "lost-rank": lambda ending: ending.close_with(78),
    "late-call": lambda ending: ending.close_with(75),
    "closed": Ending.on_closed,
}
"""The events of the train thread, by name."""


@pytest.mark.parametrize(
    ("story", "moves", "kind", "code"),
    [
        pytest.param("", "", "STOPPING", None, id="training"),
        pytest.param("stop saved", "SAVE_STOP -", "SAVED", None, id="a stop that is saved"),
        pytest.param(
            "stop saved leave", "SAVE_STOP - CLOSE", "SAVED", 75,
            id="a saved stop that is left",
        ),
        pytest.param("stop failed saved", "SAVE_STOP SAVE_STOP -", "SAVED", None, id="saved at the second try"),
        pytest.param(
            "stop failed failed failed", "SAVE_STOP SAVE_STOP SAVE_STOP -", "GAVE_UP", None,
            id="given up after three tries",
        ),
        pytest.param("stop hopeless", "SAVE_STOP -", "GAVE_UP", None, id="no try can help"),
        pytest.param("hopeless leave", "- CLOSE", "GAVE_UP", 75, id="the time was over before the stop"),
        pytest.param(
            "reach leave failed", "- MEET CLOSE", "GAVE_UP", 75,
            id="a program that saves by itself: its save isn't tried again",
        ),
        pytest.param("reach leave saved", "- MEET CLOSE", "SAVED", 75, id="a program that saves by itself"),
        pytest.param("reach close()", "- AGREE", "STOPPING", None, id="close() instead"),
        pytest.param(
            "end-itself all-save-and-stop failed saved", "AGREE SAVE_STOP SAVE_STOP CLOSE", "SAVED", 75,
            id="a program that ends itself",
        ),
        pytest.param(
            "end-itself all-stop failed", "AGREE MEET CLOSE", "GAVE_UP", 75,
            id="the same, where what was in flight fails",
        ),
        pytest.param(
            "end-itself all-lose-and-stop saved", "AGREE MEET CLOSE", "GAVE_UP", 75,
            id="the same, with nothing that can be saved together",
        ),
        pytest.param(
            "end-itself hopeless", "AGREE CLOSE", "GAVE_UP", 75,
            id="the same, where the other ranks don't end",
        ),
        pytest.param(
            "leave all-stop saved", "AGREE MEET CLOSE", "SAVED", 75,
            id="another rank's program has ended itself",
        ),
        pytest.param("leave all-save done closed", "AGREE SAVE_LAST CLOSE -", "DONE", 0, id="done"),
        pytest.param("leave none-saves", "AGREE CLOSE", "DONE", 0, id="done, with nothing to save"),
        pytest.param("leave all-lose", "AGREE CLOSE", "DONE", 0, id="done, with a step that can't be saved"),
        pytest.param("leave fenced", "AGREE CLOSE", "FENCED", 77, id="fenced before"),
        pytest.param("stop lost-rank", "SAVE_STOP CLOSE", "PEER_LOST", 78, id="a lost rank"),
        pytest.param(
            "bug fenced", "CLOSE CLOSE", "FENCED", 77, id="an exception that turns out to be a fence"
        ),
        pytest.param("bug", "CLOSE", "FAILED", 1, id="an exception"),
        pytest.param("late-call", "CLOSE", "GAVE_UP", 75, id="the time was over in a call"),
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
    assert HEARD["failed"](ending).has_stopped


def test_a_stop_is_reached_once_and_stopped_at_once() -> None:
    assert SAVED.reach(9) == SAVED


NOW_S = 110.0
ASKED = Notice(source=NoticeSource.CALL, monotonic_s=10.0, kills=False)
KNOWN, PREEMPTED_S = 30 - 1.5, 15 - 1.5
"""What a grace period leaves of 30 s, and a preemption of its 15: the rest is for the process's end."""


def told(source: str = "sigterm", monotonic_s: float = 100.0) -> Notice:
    return Notice(source=NoticeSource(source), monotonic_s=monotonic_s)


def grace_of(grace_s: float | None, *notices: Notice, launcher_s: float = math.inf) -> Schedule:
    return Schedule(grace_s=grace_s, launcher_s=launcher_s, notices=notices, now_s=NOW_S)


LEFT = {
    "no notice": (grace_of(30), None, None),
    "a signal": (grace_of(30, told()), KNOWN - 10, KNOWN - 10),
    "another rank's": (grace_of(30, told("peer")), KNOWN - 10, KNOWN - 10),
    "the grace period is over": (grace_of(5, told()), 0.0, 0.0),
    "it isn't known how long it is": (grace_of(None, told()), None, 22 - 10),
    "a stop that kills no process": (grace_of(None, told("call")), None, None),
    "a stop that was asked for": (grace_of(30, ASKED), None, None),
    "a signal after it": (grace_of(30, ASKED, told()), KNOWN - 10, KNOWN - 10),
    "a signal after another rank's": (grace_of(None, told("peer", 10.0), told()), None, 22 - 10),
    "less later": (grace_of(600, told(), told("preempted", 105.0)), PREEMPTED_S - 5, PREEMPTED_S - 5),
    "more later": (grace_of(12, told(), told("preempted", 105.0)), 0.5, 0.5),
    "a launcher kills sooner": (grace_of(300, told(), launcher_s=30), KNOWN - 10, KNOWN - 10),
    "a launcher kills later": (grace_of(20, told(), launcher_s=30), 8.5, 8.5),
    "a launcher hears of no file": (grace_of(300, told("file"), launcher_s=30), 288.5, 288.5),
}


@pytest.mark.parametrize(("grace", "left_s", "wait_left_s"), LEFT.values(), ids=LEFT)
def test_what_notices_leave(grace: Schedule, left_s: float | None, wait_left_s: float | None) -> None:
    assert grace.left_s == left_s
    assert grace.wait_left_s(0.0) == wait_left_s
    assert grace.bound_s(60.0) == (60.0 if left_s is None else min(60.0, left_s))
    assert grace.bound_s(0.1) == min(0.1, grace.bound_s(60.0))


def test_a_wait_that_makes_progress_goes_on_where_no_end_is_known() -> None:
    assert grace_of(None, told()).wait_left_s(109.0) == 22 - 1
    assert grace_of(30, told()).wait_left_s(109.0) == KNOWN - 10


@pytest.mark.parametrize(
    ("notice", "rank", "left_s"),
    [
        (told("sigterm", 104.0), 0, 10 - 6),
        (told("peer", 104.0), 1, 8 - 6),
        (told("file", 94.0), 0, 0),
        (Notice(source=NoticeSource.DIRECTIVE, monotonic_s=104.0, kills=False), 0, None),
    ],
)
def test_a_start_that_waits_for_others_is_left_soon_after_a_notice(
    notice: Notice, rank: int, left_s: float | None
) -> None:
    schedule = Schedule(rank=rank, grace_s=120).with_notice(notice)
    later = replace(schedule, now_s=NOW_S)
    assert replace(later, is_starting=True).wait_left_s(0.0) == left_s
    assert later.wait_left_s(0.0) == (None if left_s is None else 120 - 1.5 - (NOW_S - notice.monotonic_s))


@pytest.mark.parametrize(
    ("notices", "has_started", "raised"),
    [
        ([told()], False, NoticeDeadlineError),
        ([told()], True, PeerLostError),
        ([told("peer")], False, PeerLostError),
        ([], False, PeerLostError),
    ],
)
def test_a_rank_that_is_told_before_the_start_ends_as_told_also_where_another_goes_first(
    notices: list[Notice], has_started: bool, raised: type[Exception]
) -> None:
    heard = Notices(grace_of(600, *notices), trigger=None, on_first=lambda _: None, on_tick=lambda: None)
    with pytest.raises(raised, match="the store is gone"), heard.starting(lambda: has_started):
        raise PeerLostError("the store is gone")


@pytest.mark.parametrize(
    ("grace", "stuck_since_s", "overdue_s"),
    [
        pytest.param(grace_of(30, told()), 0.0, 129.7, id="shortly before the kill"),
        pytest.param(
            grace_of(None, told()), 0.0, 127.0, id="without a known end: the longest wait, and the end"
        ),
        pytest.param(grace_of(None, told()), 101.0, 128.0, id="a call that began later has longer"),
        pytest.param(grace_of(30), 0.0, None, id="no notice"),
        pytest.param(grace_of(30, ASKED), 0.0, None, id="a stop that was asked for"),
    ],
)
def test_a_process_is_ended_shortly_before_it_would_be_killed(
    grace: Schedule, stuck_since_s: float, overdue_s: float | None
) -> None:
    before_s = 1e6 if overdue_s is None else overdue_s - 0.1
    assert not replace(grace, now_s=before_s).is_overdue(stuck_since_s)
    assert replace(grace, now_s=before_s + 0.2).is_overdue(stuck_since_s) is (overdue_s is not None)


@pytest.mark.parametrize(
    ("ask", "known_s", "unknown_s", "asked_s"),
    [
        (lambda grace: grace.closing_timeout_s, 4.0, 4.0, 9.0),
        (lambda grace: grace.end_left_s, 30 - 10 - 0.3, 5.0, None),
        (lambda grace: grace.bound_s(END_WAIT_S), KNOWN - 10, 60.0, 60.0),
        (lambda grace: grace.bound_s(ENDS_APART_S), 10.0, 10.0, 10.0),
    ],
    ids=["the manager's end", "the process's end", "a wait at the end", "a wait for what may have ended"],
)
def test_the_end_has_as_long_as_no_kill_comes_before(
    ask: Callable[[Schedule], float | None], known_s: float, unknown_s: float, asked_s: float | None
) -> None:
    graces = grace_of(30, told()), grace_of(None, told()), grace_of(30, ASKED)
    assert [ask(grace) for grace in graces] == [pytest.approx(known_s), unknown_s, asked_s]


@pytest.mark.parametrize(
    ("environ", "grace_s"),
    [
        ({}, math.inf),
        ({"TORCHELASTIC_RUN_ID": "none"}, 30),
        ({"TORCHELASTIC_RUN_ID": "none", "STEPKEEPER_LAUNCHER": "1"}, math.inf),
    ],
)
def test_torchrun_kills_unless_our_own_launcher_keeps_sigterm_from_it(
    environ: dict[str, str], grace_s: float
) -> None:
    assert launcher_grace_s(environ) == grace_s
