"""Ranks as threads of this process: whatever the interleaving, they act at the same steps."""

import itertools
import random
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from typing_extensions import override

from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.coordination.step_agreement import STOP, StepAgreement
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import NoticeDeadlineError, PeerLostError
from stepkeeper_planners.geometry.layout import Ranks


class Board:
    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self.changed = threading.Condition()


class ThreadRankGroup(SoloRankGroup):
    """One rank's end of a board that all ranks share."""

    def __init__(self, board: Board, rank: int, world_size: int) -> None:
        super().__init__()
        self.board = board
        self.rank = rank  # type: ignore[misc]  # SoloRankGroup's own is final
        self.world_size = world_size  # type: ignore[misc]  # as above
        self.ranks = Ranks(rank=rank, world_size=world_size)  # type: ignore[misc]  # as above

    @override
    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        if self.rank == 0:
            assert value is not None
            self._set(name, value)
        return self._get(name, timeout_s)

    @override
    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        self._set(f"{name}/{self.rank}", value)
        if self.rank:
            return []
        return [self._get(f"{name}/{rank}", timeout_s) for rank in range(self.world_size)]

    @override
    def propose(self, name: str, value: Mapping[str, Any]) -> None:
        with self.board.changed:
            self.board.values.setdefault(name, dict(value))
            self.board.changed.notify_all()

    @override
    def publish(self, name: str, value: Mapping[str, Any]) -> None:
        self._set(name, value)

    @override
    def read_proposal(self, name: str) -> dict[str, Any] | None:
        with self.board.changed:
            return self.board.values.get(name)

    def _set(self, name: str, value: Mapping[str, Any]) -> None:
        with self.board.changed:
            assert name not in self.board.values, f"{name} is used twice"
            self.board.values[name] = dict(value)
            self.board.changed.notify_all()

    def _get(self, name: str, timeout_s: float) -> dict[str, Any]:
        with self.board.changed:
            if not self.board.changed.wait_for(lambda: name in self.board.values, timeout_s):
                raise PeerLostError(name)
            return self.board.values[name]


class Rank:
    """Trains until all agree to stop; `wishes` are made by other threads while it does."""

    def __init__(self, rank_group: ThreadRankGroup, stride: int) -> None:
        self.agreement = StepAgreement(rank_group)
        self.agreement.start()
        self.stride = stride
        self.acted: list[tuple[int, str]] = []
        self.thread = threading.Thread(target=self.train)

    def train(self) -> None:
        for step in itertools.count(0, self.stride):
            due = self.agreement.pass_step(step)
            self.acted += [(step, name) for name in due]
            if STOP in due:
                return


def train_for_ever(agreement: StepAgreement) -> None:
    for step in itertools.count():
        agreement.pass_step(step)


@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_act_at_the_same_steps(seed: int) -> None:
    chance = random.Random(seed)
    board, world_size, stride = Board(), 3, chance.choice([1, 7])
    ranks = [Rank(ThreadRankGroup(board, rank, world_size), stride) for rank in range(world_size)]
    for rank in ranks:
        rank.thread.start()
    for name in ("save", "save/1", "save"):
        chance.choice(ranks).agreement.wish(name)
    for rank in chance.sample(ranks, chance.randrange(1, world_size + 1)):
        rank.agreement.wish(STOP)
    for rank in ranks:
        rank.thread.join(30)
        assert not rank.thread.is_alive()
    for rank in ranks:
        rank.agreement.close(5.0)
    stops = {rank.acted[-1] for rank in ranks}
    assert len(stops) == 1
    assert len({tuple(rank.acted) for rank in ranks}) == 1
    assert len(board.values) > 0


def test_a_wish_that_comes_again_in_a_rank_that_is_ahead_does_not_move_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slow rank still has the first one before it when the fast one, done with it, wishes the same again."""
    monkeypatch.setattr("stepkeeper.coordination.step_agreement._POLL_S", 0.001)
    board = Board()
    fast, slow = (StepAgreement(ThreadRankGroup(board, rank, 2)) for rank in range(2))
    for agreement in (fast, slow):
        agreement.start()
    for step in range(10):
        fast.pass_step(step)
    for step in range(4):
        slow.pass_step(step)
    slow.wish("save")
    with board.changed:
        assert board.changed.wait_for(lambda: "round/0/beyond" in board.values, 10)
    first = next(step for step in itertools.count(10) if "save" in fast.pass_step(step))
    fast.wish("save")
    with board.changed:
        assert board.changed.wait_for(lambda: "round/1/beyond" in board.values, 10)
    second = next(step for step in itertools.count(first + 1) if "save" in fast.pass_step(step))
    assert [step for step in range(4, second + 1) if "save" in slow.pass_step(step)] == [first, second]
    fast.close(5.0)
    slow.close(5.0)


@pytest.mark.parametrize("wish", [STOP, "policy/3"])
def test_a_wish_that_comes_while_all_go_back_is_due_at_the_first_step_from_there(
    wish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepkeeper.coordination.step_agreement._POLL_S", 0.001)
    board = Board()
    ranks = [StepAgreement(ThreadRankGroup(board, rank, 2)) for rank in range(2)]
    for agreement in ranks:
        agreement.start()
        assert agreement.pass_step(1000) == ()
    ranks[1].wish(wish)
    with board.changed:
        assert board.changed.wait_for(lambda: "round/0/beyond" in board.values, 10)
    assert [agreement.pass_step(801) for agreement in ranks] == [(wish,), (wish,)]
    for agreement in ranks:
        agreement.close(5.0)


def test_a_rank_that_is_lost_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepkeeper.coordination.step_agreement._ROUND_TIMEOUT_S", 0.05)
    board = Board()
    agreement = StepAgreement(ThreadRankGroup(board, 0, 2))
    agreement.start()
    agreement.wish(STOP)
    ThreadRankGroup(board, 1, 2).gather("agreement/met", {}, 10)
    with pytest.raises(PeerLostError):
        train_for_ever(agreement)
    agreement.close(5.0)


def test_a_stop_before_all_have_come_is_heard_of_by_those_that_are_here() -> None:
    board, heard = Board(), threading.Event()
    here = StepAgreement(ThreadRankGroup(board, 0, 3), on_early_stop=heard.set)
    told = StepAgreement(ThreadRankGroup(board, 1, 3))
    here.start()
    told.start()
    told.wish("save/7")
    assert not heard.wait(0.7), "nobody is told to stop yet"
    told.wish(STOP)
    assert heard.wait(60)
    last = StepAgreement(ThreadRankGroup(board, 2, 3))
    last.start()
    with board.changed:
        assert board.changed.wait_for(lambda: "round/1/beyond" in board.values, 10)
    for agreement in (here, told, last):
        agreement.close(5.0)


def test_a_rank_trains_on_past_its_wish_to_stop_until_the_notices_time_is_over() -> None:
    waits, left_s = Waits(), [2.0, 1.0, 0.0]
    waits.notice_left_s = lambda _since_s: left_s.pop(0)
    # Not started: as where the store that the ranks talk over gives no answer.
    agreement = StepAgreement(ThreadRankGroup(Board(), 1, 2), waits)
    agreement.wish("save/7")
    assert agreement.pass_step(1) == ()
    agreement.wish(STOP)
    assert [agreement.pass_step(step) for step in (2, 3)] == [(), ()]
    with pytest.raises(NoticeDeadlineError):
        agreement.pass_step(4)
