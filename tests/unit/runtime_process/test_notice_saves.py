"""Told to stop at a step that is in a save already, all ranks begin another one or none does."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination.rank_group import SoloRankGroup, StoreRankGroup
from stepkeeper.coordination.root_check import RootProof
from stepkeeper.policy.save import SaveCost
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.report import SaveState
from stepkeeper.save.request import SaveRequest
from stepkeeper.save.saver import Saver
from stepkeeper.training.stop_save import StandingSave, StopSave, choose_another_save, choose_stop_save
from stepkeeper_testing.saves import saver_with

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
        saves = saver_with(rank_group=rank_group)
        saves._newest_save = InFlight(7)
        saves._newest_save.state = state
        ranks.append(saves)
    return ranks


def notice(ranks: list[Saver], step: int, timeout_s: float) -> None:
    request = SaveRequest(step=step, state={})
    with ThreadPoolExecutor(len(ranks)) as threads:
        for done in [
            threads.submit(StopSave(each, each._rank_group).start, request, timeout_s) for each in ranks
        ]:
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


@pytest.mark.parametrize(
    ("states", "starts"),
    [
        ([SaveState.FAILED, SaveState.COMMITTED], True),
        # The save of step 7 has just begun, and saves take 20 s.
        ([SaveState.COMMITTED, SaveState.COMMITTING], False),
    ],
)
def test_another_step_is_added_by_all_or_by_none(
    begun: list[Saver], states: list[SaveState], starts: bool
) -> None:
    ranks = ranks_in(states)
    ranks[0]._recent_costs.cost = SaveCost(stall_s=0.1, duration_s=20.0)
    for each in ranks:
        assert each.newest_save is not None
        if each.newest_save.state is not SaveState.COMMITTING:
            each.newest_save.future.cancel()
    notice(ranks, 8, 30)
    assert set(begun) == (set(ranks) if starts else set())


def standing(in_flight_s: float | None, left_s: float | None, **more: bool) -> StandingSave:
    return StandingSave(
        is_of_stop=more.get("is_of_stop", False),
        failed=more.get("failed", False),
        in_flight_s=in_flight_s,
        left_s=left_s,
    )


@pytest.mark.parametrize(
    ("ranks", "cost_s", "starts", "why"),
    [
        ([standing(None, 10.0)], 60.0, True, None),
        ([standing(3.0, None)], 60.0, True, None),
        ([standing(3.0, 10.0)], None, True, "no save has been measured yet"),
        (
            [standing(3.0, 10.0)],
            5.0,
            True,
            "10.0 s are left, the save in flight needs about 2.0 s more, and one more",
        ),
        ([standing(3.0, 6.9)], 5.0, False, "only the one in flight is finished"),
        # The one that began last, and the one that is killed first, decide.
        ([standing(3.0, 10.0), standing(1.0, 20.0), standing(None, 8.9)], 5.0, False, "8.9 s are left"),
        ([standing(9.0, 5.0)], 5.0, True, "needs about 0.0 s more"),
    ],
)
def test_a_save_is_added_if_there_is_time_for_both(
    ranks: list[StandingSave], cost_s: float | None, starts: bool, why: str | None
) -> None:
    choice = choose_stop_save(ranks, cost_s)
    assert choice.starts is starts
    assert choice.why == why if why is None or choice.why is None else why in choice.why


@pytest.mark.parametrize(
    ("left_s", "cost_s", "starts"),
    [(9.0, 10.0, False), (11.0, 10.0, True), (9.0, None, True), (None, 10.0, True)],
)
def test_what_failed_is_saved_once_more_where_time_is_left(
    left_s: float | None, cost_s: float | None, starts: bool
) -> None:
    failed = StandingSave(is_of_stop=True, failed=True, in_flight_s=None, left_s=left_s)
    assert choose_another_save([failed, replace(failed, left_s=60.0)], cost_s).starts is starts


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
        self.silent.wait(60)


def test_a_root_that_gives_no_answer_does_not_take_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    answer = threading.Event()
    saves = saver_with()
    saves._root_proving._proof = cast(RootProof, Proof(answer))
    late = threading.Timer(3, answer.set)
    late.start()
    StopSave(saves, SoloRankGroup()).start(SaveRequest(step=1, state={"step": 1}), 0.1)
    assert not answer.is_set()
    late.cancel()
    answer.set()
    assert saves.newest_save is None
    assert "another rank gave no answer for 0.1 s" in caplog.text
    saves.close()
