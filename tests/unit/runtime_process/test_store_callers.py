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


def test_a_call_waits_for_no_other_one() -> None:
    callers = StoreCallers(HashStore())
    outer, inner = callers.ask(lambda _client: (threading.get_ident(), thread_of(callers)), 60.0, go_on)
    assert outer != inner


class GivenUpError(Exception):
    """Nobody waits for the call any more."""


def give_up_inside(callers: StoreCallers, free: threading.Event) -> None:
    """Ask what the store doesn't answer until the event is set, and give up as soon as a thread is in the call."""
    inside = threading.Event()

    def wait(_client: object) -> None:
        inside.set()
        free.wait(60)

    def check() -> None:
        if inside.is_set():
            raise GivenUpError

    with pytest.raises(GivenUpError):
        callers.ask(wait, 60.0, check)


def test_a_thread_that_is_stuck_is_left_behind_and_the_other_one_is_asked_on() -> None:
    callers, free = StoreCallers(HashStore()), threading.Event()
    give_up_inside(callers, free)
    assert thread_of(callers) != threading.get_ident()
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
    with pytest.raises(PeerLostError, match="rank 1 gets no answer from rank 0, which has the store"):
        group.look_for_loss()
    assert not stuck.is_set()
