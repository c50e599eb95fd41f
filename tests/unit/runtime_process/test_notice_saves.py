"""Told to stop at a step that is in a save already, all ranks begin another one or none does."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it
from typing_extensions import override

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import SoloRankGroup, StoreRankGroup
from stepkeeper.coordination.root_check import RootProof
from stepkeeper.errors import StorageError
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.report import SaveState
from stepkeeper.save.request import SaveRequest
from stepkeeper.save.saver import Saver
from stepkeeper.storage.memory import MemoryStore

WORLD_SIZE = 3


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Saver]:
    """Those that have begun one."""
    found: list[Saver] = []

    def start_save(saves: Saver, request: SaveRequest, _timeout_s: float) -> None:
        assert request.is_last
        found.append(saves)

    monkeypatch.setattr(Saver, "start_save", start_save)
    return found


def ranks_in(states: list[SaveState]) -> list[Saver]:
    """One rank each, whose last save, of step 7, has come so far as it knows."""
    store = HashStore()
    ranks = []
    for rank, state in enumerate(states):
        rank_group = StoreRankGroup(store, rank, len(states))
        saves = Saver(
            MemoryStore(), cast(Companion, None), rank_group, Progress(lambda _state: None), max_pending=1
        )
        saves._newest_save = InFlight(7)
        saves._newest_save.state = state
        ranks.append(saves)
    return ranks


def notice(ranks: list[Saver], step: int, timeout_s: float) -> None:
    request = SaveRequest(step=step, state={})
    with ThreadPoolExecutor(len(ranks)) as threads:
        for done in [threads.submit(each.save_for_notice, request, timeout_s) for each in ranks]:
            done.result(60)
    for each in ranks:
        each.close()


@pytest.mark.parametrize("knows", range(WORLD_SIZE))
def test_a_failure_that_one_rank_knows_of_first_is_made_good_by_all(knows: int, begun: list[Saver]) -> None:
    states = [SaveState.COMMITTING] * WORLD_SIZE
    states[knows] = SaveState.FAILED
    ranks = ranks_in(states)
    notice(ranks, 7, 30)
    assert set(begun) == set(ranks)


def test_what_is_on_its_way_is_not_begun_again(begun: list[Saver]) -> None:
    notice(ranks_in([SaveState.COMMITTED, SaveState.COMMITTING]), 7, 30)
    assert not begun


def test_another_step_needs_no_agreement(begun: list[Saver]) -> None:
    ranks = ranks_in([SaveState.FAILED, SaveState.COMMITTED])
    notice(ranks, 8, 0)
    assert set(begun) == set(ranks)


def test_where_a_rank_does_not_answer_none_begins_alone(begun: list[Saver]) -> None:
    ranks = ranks_in([SaveState.FAILED, SaveState.FAILED])
    notice(ranks[1:], 7, 0.1)
    assert not begun


class Proof:
    made = False

    """Of a root that gives no answer while it is `silent`."""

    def __init__(self, silent: threading.Event) -> None:
        self.silent = silent

    def make(self) -> None:
        self.silent.wait(20)


def test_a_root_that_gives_no_answer_does_not_take_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    rank_group, answer = SoloRankGroup(), threading.Event()
    saves = Saver(
        MemoryStore(), cast(Companion, None), rank_group, Progress(lambda _state: None), max_pending=1
    )
    saves._proof = cast(RootProof, Proof(answer))
    late = threading.Timer(3, answer.set)
    late.start()
    saves.save_for_notice(SaveRequest(step=1, state={"step": 1}), 0.05)
    assert not answer.is_set()
    late.cancel()
    answer.set()
    assert saves.newest_save is None
    assert "another rank gave no answer for 0.1 s" in caplog.text
    saves.close()


def test_why_the_root_is_none_is_said_where_there_is_a_limit_too(caplog: pytest.LogCaptureFixture) -> None:
    class Refused(Proof):
        @override
        def make(self) -> None:
            raise StorageError("no such bucket")

    saves = Saver(
        MemoryStore(), cast(Companion, None), SoloRankGroup(), Progress(lambda _state: None), max_pending=1
    )
    saves._proof = cast(RootProof, Refused(threading.Event()))
    saves.save_for_notice(SaveRequest(step=1, state={"step": 1}), 30)
    assert "no such bucket" in caplog.text
    saves.close()


def test_what_the_root_says_is_raised_as_it_is_where_there_is_no_limit() -> None:
    class TimedOut(Proof):
        @override
        def make(self) -> None:
            raise TimeoutError(errno.ETIMEDOUT, "the mount gives no answer")

    saves = Saver(
        MemoryStore(), cast(Companion, None), SoloRankGroup(), Progress(lambda _state: None), max_pending=1
    )
    saves._proof = cast(RootProof, TimedOut(threading.Event()))
    with pytest.raises(TimeoutError, match="the mount gives no answer"):
        saves.await_saves_and_prove_root()
    saves.close()


def test_a_root_that_was_proven_takes_no_time_where_none_is_left() -> None:
    saves = Saver(
        MemoryStore(), cast(Companion, None), SoloRankGroup(), Progress(lambda _state: None), max_pending=1
    )
    proof = Proof(threading.Event())
    proof.made = True
    saves._proof = cast(RootProof, proof)
    assert saves._prove_root(0.0) == 0.0
    saves.close()
