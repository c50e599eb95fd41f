"""What ends a wait: what is waited for, a notice's time, or the loss of a rank; nothing else."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination import store_callers, upkeep_wait
from stepkeeper.coordination import waits as waits_module
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.coordination.upkeep_wait import UpkeepWait
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import FencedError, NoticeDeadlineError, PeerLostError, StepkeeperError
from stepkeeper.save.worker import Worker
from stepkeeper.time_limits import TimeLimits


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
    with pytest.raises(NoticeDeadlineError, match="resumes from the newest commit"):
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


def test_the_time_of_a_notice_starts_anew_with_progress_and_with_no_further_wait() -> None:
    waits = Waits()
    told_s = time.monotonic() - 60.0

    class Silence:
        def left_s(self, progress_s: float) -> float:
            return max(told_s, progress_s) + 22.0 - time.monotonic()

    silence = Silence()
    waits.limit_by_notices(silence.left_s)
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


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_callers, "_LOOK_S", 0.001)


@pytest.fixture(name="stuck")
def _stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the store answer nothing, until the event is set."""
    free = threading.Event()

    def check(*_: object) -> bool:
        free.wait(10)
        return False

    monkeypatch.setattr(HashStore, "check", check)
    yield free
    free.set()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("notice", NoticeDeadlineError),
        ("fence", FencedError),
        ("loss", PeerLostError),
        ("abort", PeerLostError),
    ],
)
def test_a_rank_whose_store_stands_still_waits_only_as_long_as_it_may(
    stuck: threading.Event, how: str, error: type[StepkeeperError]
) -> None:
    waits = Waits()
    group = StoreRankGroup(HashStore(), 1, 2, waits=waits)
    if how == "notice":
        waits.notice_left_s = lambda _since_s: 0.0
    elif how == "abort":
        group.abort()
    else:
        waits.end_all(error("rank 0 is lost"))
    with pytest.raises(error):
        group.read_proposal("lost")
    with pytest.raises(error):
        group.broadcast("save/3/outcome", None, 3600.0)
    assert not stuck.is_set()


def test_a_store_that_gives_no_answer_at_all_is_lost(stuck: threading.Event) -> None:
    group = StoreRankGroup(HashStore(), 1, 2, limits=TimeLimits(0.01))
    with pytest.raises(
        PeerLostError, match="rank 1 gets no answer from rank 0, which holds the ranks' store"
    ):
        group.look_for_loss()
    assert not stuck.is_set()


@pytest.fixture(autouse=True)
def _looks_often_at_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_wait, "_LOOK_S", 0.001)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_stuck_is_not_waited_for_without_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    monkeypatch.setattr(upkeep_wait, "_LONGEST_S", 0.05)
    wait = UpkeepWait(StoreRankGroup(HashStore(), rank, 2), Waits())
    wait.note_commit(7, Future() if rank == 0 else None)
    wait.await_newest()
    assert "the upkeep after the commit in slot 7 isn't done" in caplog.text


def notice(waits: Waits) -> None:
    waits.notice_left_s = lambda _since_s: 30.0


def loss(waits: Waits) -> None:
    waits.end_all(PeerLostError("rank 1 is lost"))


@pytest.mark.parametrize("told", [notice, loss])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_has_to_stop_leaves_it_to_the_next_start(
    told: Callable[[Waits], None], rank: int
) -> None:
    waits = Waits()
    wait = UpkeepWait(StoreRankGroup(HashStore(), rank, 2), waits)
    wait.note_commit(1, Future() if rank == 0 else None)
    told(waits)
    wait.await_newest()


def test_other_ranks_hear_of_it_from_rank_0() -> None:
    store = HashStore()
    first, second = (UpkeepWait(StoreRankGroup(store, rank, 2), Waits()) for rank in range(2))
    ends = {slot: Future[None]() for slot in (3, 5)}
    for slot, done in ends.items():
        first.note_commit(slot, done)
    second.note_commit(5, None)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(second.await_newest)
        ends[3].set_result(None)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        ends[5].set_result(None)
        waiting.result(60)
    second.await_newest()
