"""All ranks act at the same steps: the rules that one rank can follow by itself, and ranks as threads."""

import itertools
import random
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it
from typing_extensions import override

from stepkeeper.coordination.agreement_rules import (
    STOP,
    STOP_ASKED,
    Agreed,
    Answer,
    Await,
    Conclude,
    Listen,
    Open,
    Position,
    RankView,
    kills_for,
)
from stepkeeper.coordination.rank_group import SoloRankGroup, StoreRankGroup
from stepkeeper.coordination.step_agreement import StepAgreement
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import NoticeDeadlineError, PeerLostError
from stepkeeper.policy.save import (
    AnyOf,
    Continuous,
    EveryNSteps,
    OnPreemption,
)
from stepkeeper.training.save_decision import SaveConditions, SaveDecider
from stepkeeper_planners.geometry.layout import Ranks


@pytest.mark.parametrize(
    ("stops", "kills"),
    [([], None), ([None], None), ([STOP_ASKED], False), ([STOP], True), ([STOP_ASKED, STOP], True)],
)
def test_a_process_is_killed_for_a_stop_that_was_not_only_asked_for(
    stops: list[str | None], *, kills: bool | None
) -> None:
    assert kills_for(stops) is kills


def test_alone_a_rank_acts_at_its_next_step_on_all_that_it_wishes() -> None:
    alone = RankView(rank=0).wish("save/a").agree_alone().wish(STOP).wish(STOP).wish("save/a").agree_alone()
    assert alone.wishes == ()
    assert alone.agreed_stop == STOP
    after, due = alone.pass_step(0)
    assert due == ("save/a", STOP)
    assert (after.agreed, after.agreed_stop) == ((), None)


@pytest.mark.parametrize(("rank", "waits"), [(0, Conclude(0, Position(1, 3))), (1, Await(0))])
def test_a_round_goes_from_the_wish_to_the_latest_step_of_all(rank: int, waits: Conclude | Await) -> None:
    view, _ = RankView(rank=rank).pass_step(5)
    assert view.next_move() == Listen(0)
    assert view.hear_wish(None) == view
    assert view.wish("save/a").next_move() == Open(0, "save/a")
    held = view.hear_wish("save/a")
    assert held.is_held
    assert held.next_move() == Answer(0, Position(0, 5))
    answered = held.hear_answers((Position(0, 5), Position(1, 3)))
    assert answered.is_held
    assert answered.next_move() == waits
    agreed = answered.wish("save/a").wish("save/b").hear_conclusion(Position(1, 3))
    assert not agreed.is_held
    assert agreed.agreed == (Agreed("save/a", Position(1, 3)),)
    assert agreed.next_move() == Open(1, "save/b")


def test_a_step_below_the_last_one_is_beyond_it_and_due_only_once() -> None:
    view = RankView(rank=1, agreed=(Agreed("save/a", Position(0, 9)), Agreed("save/b", Position(1, 2))))
    before, none = view.pass_step(9)
    assert none == ()
    after, due = before.pass_step(2)
    assert due == ("save/a",)
    assert after.pass_step(3)[1] == ("save/b",)


def test_only_a_lower_step_is_a_return() -> None:
    assert [Position(1, 5).follow_by(step) for step in (4, 5, 6)] == [
        Position(2, 4),
        Position(1, 5),
        Position(1, 6),
    ]


def asked(decider: SaveDecider, step: int) -> bool:
    decider.should_stop_at(step)
    return decider.is_save_due(step)


def test_a_save_that_was_asked_for_is_due_at_its_step_until_it_is_begun() -> None:
    decider = SaveDecider(EveryNSteps(1000), SoloRankGroup())
    assert not asked(decider, 1)
    decider.request_save("request-1")
    assert [asked(decider, 2), asked(decider, 2)] == [True, True]
    decider.on_save_started()
    decider.request_save("request-1")
    assert [asked(decider, 2), asked(decider, 3)] == [False, False]


def test_the_step_of_a_preemption_is_one_for_the_policy() -> None:
    stop = SaveDecider(AnyOf((EveryNSteps(1000), OnPreemption())), SoloRankGroup())
    assert [stop.is_save_due(7, stopping=True), stop.is_save_due(7)] == [True, False]
    assert not SaveDecider(EveryNSteps(1000), SoloRankGroup()).is_save_due(7, stopping=True)


class TalkingRankGroup(StoreRankGroup):
    """Counts what goes through the store."""

    n_asked = 0

    def read_proposal(self, name: str, *, within_s: float | None = None) -> dict[str, Any] | None:  # type: ignore[explicit-override]  # Python 3.11 has none
        if not name.startswith(("round/", "agreement/")):
            self.n_asked += 1
        return super().read_proposal(name)

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:  # type: ignore[explicit-override]  # Python 3.11 has none
        assert name.startswith(("round/", "agreement/")), "no other way to agree"
        return super().gather(name, value, timeout_s)


def agreed_on(decider: SaveDecider) -> bool:
    """Waits until this rank knows of a step for a wish."""
    agreement = decider._agreement
    with agreement._changed:
        return agreement._changed.wait_for(lambda: bool(agreement._view.agreed), 60)


@pytest.mark.timeout(120)
def test_a_wish_that_a_save_has_overtaken_is_dropped_in_all_ranks() -> None:
    """Rank 1 is ahead by the step that is saved anyway: what rank 0 wishes before that is agreed on for the next."""
    store, policy, saving = HashStore(), AnyOf((EveryNSteps(100), Continuous())), False
    behind = SaveDecider(policy, TalkingRankGroup(store, 0, 2), lambda: SaveConditions(saving=saving))
    ahead = SaveDecider(policy, TalkingRankGroup(store, 1, 2))
    for decider in (behind, ahead):
        decider.start()
    assert asked(ahead, 100)
    ahead.on_save_started()
    assert not asked(behind, 99), "it wishes to save the next step that it can"
    assert agreed_on(behind)
    assert agreed_on(ahead)
    assert asked(behind, 100)
    behind.on_save_started()
    saving = True
    for decider in (behind, ahead):
        assert not asked(decider, 101)
    saving = False
    assert not asked(behind, 102), "it wishes the same again, after another save"
    assert agreed_on(behind)
    assert agreed_on(ahead)
    saving = True
    for decider in (ahead, behind):
        assert [asked(decider, 102), asked(decider, 103)] == [False, True]
        decider.on_save_started()
        assert not asked(decider, 104)
        decider.close(5.0)


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
