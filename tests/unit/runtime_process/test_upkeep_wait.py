"""Waiting for what follows a commit ends when it is done, and before where there is something else to do."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination import upkeep_wait
from stepkeeper.coordination.rank_group import SoloRankGroup, StoreRankGroup
from stepkeeper.coordination.upkeep_wait import UpkeepWait
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import CompanionLostError, PeerLostError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_wait, "_LOOK_S", 0.001)


def wait_of(*, waits: Waits | None = None, done: Future[None] | None = None) -> UpkeepWait:
    wait = UpkeepWait(SoloRankGroup(), waits or Waits())
    if done is not None:
        wait.note_commit(1, done)
    return wait


def two_ranks() -> tuple[UpkeepWait, UpkeepWait]:
    store = HashStore()
    first, second = (UpkeepWait(StoreRankGroup(store, rank, 2), Waits()) for rank in range(2))
    return first, second


def test_without_a_commit_there_is_nothing_to_wait_for() -> None:
    wait_of().await_newest()


def test_the_newest_commit_is_what_counts() -> None:
    old, new = Future[None](), Future[None]()
    wait = wait_of(done=old)
    wait.note_commit(2, new)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(wait.await_newest)
        old.set_result(None)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        new.set_result(None)
        waiting.result(60)


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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_stuck_is_not_waited_for_without_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    monkeypatch.setattr(upkeep_wait, "_LONGEST_S", 0.05)
    wait = UpkeepWait(StoreRankGroup(HashStore(), rank, 2), Waits())
    wait.note_commit(7, Future() if rank == 0 else None)
    wait.await_newest()
    assert "what follows the commit in slot 7 isn't done" in caplog.text


def test_the_loss_of_the_companion_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    done = Future[None]()
    done.set_exception(CompanionLostError("it went away before"))
    wait_of(done=done).await_newest()
    assert "it went away before" in caplog.text


def test_other_ranks_hear_of_it_from_rank_0() -> None:
    first, second = two_ranks()
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


def test_what_is_told_late_takes_nothing_back() -> None:
    first, second = two_ranks()
    for slot in (5, 3):
        first._publish(slot)
    second.note_commit(5, None)
    began_s = time.monotonic()
    second.await_newest()
    assert time.monotonic() - began_s < upkeep_wait._LONGEST_S / 2


def test_a_rank_whose_store_is_gone_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(_self: StoreRankGroup, _name: str) -> None:
        raise PeerLostError("the store is gone")

    monkeypatch.setattr(StoreRankGroup, "read_proposal", gone)
    _, second = two_ranks()
    second.note_commit(1, None)
    second.await_newest()
    assert "the store is gone" in caplog.text
