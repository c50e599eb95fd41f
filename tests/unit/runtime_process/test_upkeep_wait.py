"""Waiting for what follows a commit ends when it is done, and before where there is something else to do."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination import upkeep_wait
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.coordination.upkeep_wait import UpkeepWait
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import PeerLostError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_wait, "_LOOK_S", 0.001)


def two_ranks() -> tuple[UpkeepWait, UpkeepWait]:
    store = HashStore()
    first, second = (UpkeepWait(StoreRankGroup(store, rank, 2), Waits()) for rank in range(2))
    return first, second


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
