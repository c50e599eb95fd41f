"""Who asks the ranks' store waits no longer than it may, and leaves a thread behind only where the store is stuck."""

import threading
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination import store_callers
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.coordination.store_callers import StoreCallers
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import FencedError, NoticeDeadlineError, PeerLostError, StepkeeperError
from stepkeeper.time_limits import TimeLimits


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
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


def go_on() -> None:
    return None


def thread_of(callers: StoreCallers) -> int:
    return callers.ask(lambda _client: threading.get_ident(), 60.0, go_on)


def test_calls_one_after_the_other_are_made_in_one_thread() -> None:
    callers = StoreCallers(HashStore())
    assert len({thread_of(callers) for _ in range(20)}) == 1
    assert thread_of(callers) != threading.get_ident()


def test_calls_at_once_are_made_in_several_threads_and_none_waits_for_another() -> None:
    callers = StoreCallers(HashStore())
    inner = callers.ask(lambda _client: thread_of(callers), 60.0, go_on)
    assert inner != thread_of(callers) or inner != thread_of(callers)


def test_what_a_call_raises_is_raised_where_it_was_asked() -> None:
    callers = StoreCallers(HashStore())
    for error in (RuntimeError("Connection reset by peer"), TimeoutError("its own")):

        def fail(_client: object, error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)):
            callers.ask(fail, 60.0, go_on)


def test_a_thread_that_is_stuck_is_left_behind_and_the_others_are_asked_on(stuck: threading.Event) -> None:
    callers = StoreCallers(HashStore())
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"no answer for 0\.0 s"):
            callers.ask(lambda client: client.check(["name"]), 0.0, go_on)
    assert not stuck.is_set()
    assert thread_of(callers) != threading.get_ident()


def test_the_threads_end_when_nobody_asks_any_more() -> None:
    callers = StoreCallers(HashStore())
    thread = callers.ask(lambda _client: threading.current_thread(), 60.0, go_on)
    del callers
    thread.join(60)
    assert not thread.is_alive()


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
    with pytest.raises(PeerLostError, match="rank 1 gets no answer from rank 0, which has the store"):
        group.look_for_loss()
    assert not stuck.is_set()
