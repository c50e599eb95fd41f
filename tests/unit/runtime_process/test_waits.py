"""What ends a wait: what is waited for, a notice's time, or the loss of a rank; nothing else."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest

from stepkeeper.coordination import waits as waits_module
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import (
    ClosedError,
    FencedError,
    NoticeDeadlineError,
    PeerLostError,
    StepkeeperError,
)
from stepkeeper.save.worker import Worker


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(waits_module, "_LOOK_S", 0.001)
    monkeypatch.setattr(waits_module, "_SETTLE_S", 0.001)
    yield
    # One that has nothing to wait for any more may have yet to see it, and the next test looks which there are.
    for guard in guards():
        guard.join(60)


def guards() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "save-guard"]


def test_a_wait_ends_with_the_notices_time_and_says_so() -> None:
    waits = Waits()
    left_s = [3.0, 2.0, 0.0]
    waits.notice_left_s = lambda _since_s: left_s.pop(0)
    with pytest.raises(NoticeDeadlineError, match="resumes the newest commit"):
        waits.await_all([Future()])
    assert left_s == []


@pytest.mark.parametrize("error", [PeerLostError("rank 1 is lost"), FencedError("rank 1 is lost")])
def test_a_loss_ends_all_waits_with_its_own_class(error: StepkeeperError) -> None:
    waits = Waits()
    waits.end_all(error)
    waits.end_all(PeerLostError("another one"))
    for call in (lambda: waits.await_all([Future()]), waits.raise_loss, lambda: waits.check(0.0)):
        with pytest.raises(type(error), match="rank 1 is lost") as raised:
            cast(Callable[[], Any], call)()
        assert raised.value is not error, "several threads raise it, each with its own trace"


def test_a_forked_child_waits_for_nothing_of_its_parents() -> None:
    waits = Waits()
    pid = os.fork()
    if pid == 0:
        try:
            waits.await_all([Future()], 20.0)
        except ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    waits.raise_loss()


def test_what_ends_soon_after_a_loss_has_ended_well() -> None:
    waits, future = Waits(), Future[None]()
    waits.end_all(PeerLostError("rank 1 is lost"))
    future.set_result(None)
    assert waits.await_all([future])


def test_calls_run_in_order_in_a_thread_that_keeps_no_process_alive_once_given_up() -> None:
    worker = Worker("save", Waits())
    free, order = threading.Event(), list[int]()
    stuck = worker.submit(free.wait, 60)
    behind = [worker.submit(order.append, number) for number in range(3)]
    (guard,) = guards()
    assert not guard.daemon, "the interpreter waits for saves that were started"
    assert not worker.close(0.0)
    guard.join(60)
    assert not guard.is_alive()
    assert not stuck.done()
    free.set()
    for each in behind:
        each.result(60)
    assert order == [0, 1, 2]
    assert worker.close(60)


def test_a_worker_whose_waits_have_ended_holds_up_no_end_of_the_interpreter() -> None:
    waits, free = Waits(), threading.Event()
    worker = Worker("save", waits)
    worker.submit(free.wait, 60)
    waits.end_all(PeerLostError("rank 1 is lost"))
    (guard,) = guards()
    guard.join(60)
    assert not guard.is_alive()
    free.set()
    assert worker.close(60)


def test_the_time_of_a_notice_starts_anew_with_progress_and_with_no_further_wait() -> None:
    waits = Waits()
    told_s = time.monotonic() - 60.0

    class Silence:
        def left_s(self, progress_s: float) -> float:
            return max(told_s, progress_s) + 22.0 - time.monotonic()

    silence = Silence()
    waits.heed_notices(silence.left_s)
    waits.check(time.monotonic())
    with pytest.raises(NoticeDeadlineError):
        waits.check(told_s)
    with pytest.raises(NoticeDeadlineError):
        waits.check(time.monotonic())
    waits.note_progress()
    waits.check(told_s)


@pytest.mark.parametrize("died", [True, False])
def test_what_fails_because_a_rank_has_ended_without_a_word_is_its_loss(died: bool) -> None:
    waits, failure = Waits(), RuntimeError("Connection closed by peer")
    waits.end_all(PeerLostError("rank 1 is lost"), is_death=died)
    explained = waits.explain(failure, 0.0)
    assert isinstance(explained, PeerLostError) is died
    assert (explained.__cause__ if died else explained) is failure
    assert waits.explain(chosen := SystemExit(3), 0.0) is chosen
