"""A saver's saves, one after the other: failures, waits and the reports to hooks."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch
from prometheus_client import CollectorRegistry
from typing_extensions import override

from stepkeeper import CheckpointManager, Options
from stepkeeper.companion.messages import Committed, Kind, Written
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import encode
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.errors import (
    CompanionLostError,
    DevicesFullError,
    FencedError,
    LogGapError,
    PeerLostError,
    RefusedError,
    SaveError,
    StepkeeperError,
    StorageError,
)
from stepkeeper.prometheus import export
from stepkeeper.save import pipeline
from stepkeeper.save.given_state import SaveRequest
from stepkeeper.save.hooks import SaveHooks
from stepkeeper.save.job import SaveJob
from stepkeeper.save.report import SaveClock, SaveReport, SaveState
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import Snapshot
from stepkeeper.save.snapshot.transfer import await_transfer
from stepkeeper_planners.errors import WrongRanksError
from stepkeeper_testing.saves import REF, record_of, saver_with

STATE = {"step": 1}


RECORD = record_of(1)


class Ends(list[BaseException | None]):
    """Decide how one save after the other ends."""

    def __call__(self, job: SaveJob, companion: Companion, rank_group: RankGroup) -> Committed:  # persist's
        end = self.pop(0)
        if end is not None:
            raise end
        return Committed(record=RECORD, uri="file:///root/1/x")


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    found = Ends()
    monkeypatch.setattr("stepkeeper.save.pipeline.persist_save", found)
    monkeypatch.setattr("stepkeeper.coordination.root_check.RootProof.make", lambda _proof: None)
    return found


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(str(tmp_path), save=1)


def test_a_failure_that_nobody_asked_for_is_raised_whatever_others_were_heard(
    manager: CheckpointManager, ends: Ends
) -> None:
    ends += [SaveError("no space"), SaveError("no answer")]
    heard = manager.save(1, STATE)
    with pytest.raises(SaveError, match="no space"):
        heard.result()
    manager.save(2, STATE)
    with pytest.raises(SaveError, match="no space"):
        heard.result()
    with pytest.raises(SaveError, match="no answer"):
        manager.wait()
    manager.close()


def test_training_continues_after_as_many_failed_saves_in_a_row_as_it_tolerates(
    tmp_path: Path, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(str(tmp_path), save=1, options=Options(on_save_failure=2))
    ends += [StorageError("full"), SaveError("no answer"), None, OSError("x"), OSError("y"), OSError("z")]
    for step in range(1, 7):
        manager.step(step, STATE)
        manager._parts.saver.wait_until_idle()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    counted = [(1, "full"), (2, "no answer"), (1, "x"), (2, "y")]
    assert warnings == [
        f"failed save {n} of 2 in a row that training continues after: {text}" for n, text in counted
    ]
    with pytest.raises(SaveError, match="a save in the background failed: z"):
        manager.step(7, STATE)
    ends += [None]
    manager.close()


@pytest.mark.parametrize("error", [FencedError, PeerLostError, RefusedError, LogGapError, WrongRanksError])
def test_what_another_save_would_meet_again_is_never_tolerated(
    tmp_path: Path, ends: Ends, error: type[Exception]
) -> None:
    manager = CheckpointManager(str(tmp_path), save=1, options=Options(on_save_failure=9))
    ends += [error("it stays so")]
    manager.step(1, STATE)
    manager._parts.saver.wait_until_idle()
    with pytest.raises(StepkeeperError, match="it stays so"):
        manager.step(2, STATE)
    assert ends == []


@pytest.mark.parametrize("last", [4, 5])
def test_the_end_saves_the_last_step_after_a_tolerated_failure_and_raises_its_own(
    tmp_path: Path, ends: Ends, last: int
) -> None:
    manager = CheckpointManager(str(tmp_path), save=4, options=Options(on_save_failure=1))
    ends += [StorageError("full"), *([None] if last == 5 else [])]
    for step in range(1, last + 1):
        manager.step(step, STATE)
        manager._parts.saver.wait_until_idle()
    if last == 5:
        manager.close()
        assert manager._parts.saver.lineage.own_commit == RECORD
    else:
        with pytest.raises(SaveError, match="full"):
            manager.close()
    assert ends == []


@pytest.mark.parametrize("error", [FencedError, PeerLostError])
def test_that_the_root_or_the_peers_are_lost_stays_true(
    manager: CheckpointManager, ends: Ends, error: type[StepkeeperError]
) -> None:
    ends += [error("it is over"), None]
    with pytest.raises(error):
        manager.save(1, STATE).result()
    with pytest.raises(error):
        manager.save(2, STATE).result()
    assert ends == [None]
    manager.close()


@pytest.mark.parametrize("error", [CompanionLostError, DevicesFullError, SaveError])
def test_a_save_for_a_notice_that_fails_is_made_again(
    manager: CheckpointManager, ends: Ends, error: type[StepkeeperError]
) -> None:
    ends += [error("killed for want of memory"), error("once more"), None]
    manager.request_stop()
    assert manager.step(1, STATE).stop
    assert not ends
    assert manager._parts.saver.lineage.own_commit == RECORD
    assert manager._parts.saver.error is None
    with pytest.raises(SystemExit):
        manager.close()


@pytest.mark.parametrize("cut_off_in", ["InFlight", "build_state", "SaveJob"])
def test_a_save_whose_start_was_cut_off_holds_up_no_later_one(
    manager: CheckpointManager, ends: Ends, monkeypatch: pytest.MonkeyPatch, cut_off_in: str
) -> None:
    """As by a signal handler's exception."""

    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    ends += [None]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, cut_off_in, interrupt)
        for step in range(1, 4):
            with pytest.raises(KeyboardInterrupt):
                manager.save(step, STATE)
    manager.save(4, STATE)
    assert manager.wait(60)
    manager.close()


LONGEST_S = 10


class SlowCompanion:
    """Commits all that it is asked to, and answers writes when it is let."""

    has_tier = False
    lost = False
    structure_key = None

    def __init__(self) -> None:
        self.writing = threading.Event()
        self.may_answer = threading.Event()
        self.n_written = 0

    def ensure_process(self) -> "SlowCompanion":
        return self

    def claim_root(self, **_: object) -> Any:
        return SimpleNamespace(claim=SimpleNamespace(slot=0))

    def send_request(self, kind: Kind, body: Any, fds: Any = (), *, timeout_s: float, **_: Any) -> Any:
        if kind is Kind.WRITE:
            self.writing.set()
            assert self.may_answer.wait(LONGEST_S)
            self.n_written += 1
            return encode(Written(size_bytes=1, manifest=REF))
        if kind is Kind.VOID:
            return {}
        record = record_of(self.n_written, body["folder"])
        return encode(Committed(record=record, uri=f"memory://bucket/{record.folder}"))

    def upkeep_of(self, _slot: int) -> Future[None]:
        return Future()


class Moves:
    """In place of what moves a snapshot from the devices. A step that nothing is said of moves at once."""

    def __init__(self) -> None:
        self.by_step: dict[int, Callable[[], object]] = {}
        self.moved: list[int] = []
        self.tried: dict[int, threading.Event] = defaultdict(threading.Event)

    def move(self, snapshot: Snapshot, region: Region) -> None:
        step = int(region.view_orders(snapshot.plan.orders)[0][0])
        try:
            self.by_step.get(step, int)()
        finally:
            self.moved.append(step)
            self.tried[step].set()


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    found = Moves()

    def move_copies(snapshot: Snapshot, region: Region) -> None:
        found.move(snapshot, region)

    monkeypatch.setattr(Snapshot, "move_copies", move_copies)
    return found


@pytest.fixture
def companion() -> Iterator[SlowCompanion]:
    found = SlowCompanion()
    yield found
    found.may_answer.set()


def state_of(step: int) -> dict[str, object]:
    return {"w": torch.full((2,), float(step))}


def test_what_cannot_be_moved_fails_its_own_save_in_its_turn(moves: Moves, companion: SlowCompanion) -> None:
    def refuse() -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    moves.by_step[2] = refuse
    saves = saver_with(companion, max_pending=2)
    first = saves.start_save(SaveRequest(step=1, state=state_of(1)))
    assert companion.writing.wait(LONGEST_S)
    second = saves.start_save(SaveRequest(step=2, state=state_of(2)))
    assert moves.tried[2].wait(LONGEST_S)
    assert not second.done
    saves.failures.raise_failure()
    with pytest.raises(TimeoutError, match="step 1 was still in flight"):
        saves.start_save(SaveRequest(step=3, state=state_of(3)), 0.0)
    companion.may_answer.set()
    assert first.result(LONGEST_S).sequence == 1
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        second.result(LONGEST_S)
    saves.failures.raise_failure()  # it was said
    assert saves.start_save(SaveRequest(step=3, state=state_of(3))).result(LONGEST_S).sequence == 2
    saves.close()


def test_a_region_is_not_used_again_before_all_is_in_it(moves: Moves, companion: SlowCompanion) -> None:
    may_move = threading.Event()
    moves.by_step[1] = lambda: may_move.wait(LONGEST_S)
    companion.may_answer.set()
    saves = saver_with(companion, max_pending=2)
    begun = [saves.start_save(SaveRequest(step=step, state=state_of(step))) for step in (1, 2)]
    assert not companion.writing.wait(0.5), "nothing is written before all of it is in the region"
    with pytest.raises(TimeoutError, match="step 1 was still in flight"):
        saves.start_save(SaveRequest(step=3, state=state_of(3)), 0.0)
    may_move.set()
    begun.append(saves.start_save(SaveRequest(step=3, state=state_of(3))))
    assert [each.result(LONGEST_S).sequence for each in begun] == [1, 2, 3]
    assert moves.moved == [1, 2, 3], "in the order of the saves"
    saves.close()


class DoneWhenLookedAt(Future[None]):
    """A transfer that ends right after a wait for it has ended in vain."""

    @override
    def done(self) -> bool:
        if not super().done():
            self.set_result(None)
        return True


def test_a_transfer_that_ends_as_a_look_at_it_ends_is_whole() -> None:
    assert await_transfer(DoneWhenLookedAt(), cast(Snapshot, None), 0.01, lambda _: None) is None


def report_of(step: int) -> SaveReport:
    return SaveClock().build_report(step, size_bytes=0, sequence=step)


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_hooks_are_called_in_order_whatever_one_of_them_raises(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: SaveReport) -> NoReturn:
        raise error

    save_hooks = SaveHooks()
    told: list[tuple[str, int]] = []
    first = save_hooks.on_save(lambda report: told.append(("first", report.step)))
    save_hooks.on_save(fail)
    save_hooks.on_save(lambda report: told.append(("last", report.step)))
    save_hooks.report_save(report_of(1))
    first()
    first()
    save_hooks.report_save(report_of(2))
    assert save_hooks.await_hooks(60)
    save_hooks.report_save(report_of(3))
    assert save_hooks.await_hooks(60)
    assert told == [("first", 1), ("last", 1), ("last", 2), ("last", 3)]
    failed = [each for each in caplog.records if "a hook for saves failed" in each.getMessage()]
    assert [each.__dict__["step"] for each in failed] == [1, 2, 3]


PARTS = ("transfer", "queue", "persist", "commit", "duration")


def finished(step: int, error: Exception | None = None) -> SaveReport:
    clock = SaveClock()
    clock.mark_released()
    clock.mark_state(SaveState.WRITING)
    if error is not None:
        return clock.build_report(step, size_bytes=50, error=error)
    clock.mark_state(SaveState.COMMITTING)
    return clock.build_report(step, size_bytes=100, sequence=step, total_bytes=120)


def test_a_save_that_failed_is_counted_as_that_and_its_stall_only() -> None:
    save_hooks, registry = SaveHooks(), CollectorRegistry()
    export(cast(CheckpointManager, save_hooks), registry)  # hooks are all that metrics use of a manager
    for step in range(1, 5):
        save_hooks.report_save(finished(step, None if step % 2 else OSError("no room")))
    assert save_hooks.await_hooks(60)
    value = registry.get_sample_value
    assert value("stepkeeper_saves_total", {"outcome": "committed"}) == 2
    assert value("stepkeeper_saves_total", {"outcome": "failed"}) == 2
    assert value("stepkeeper_saved_bytes_total") == 200
    assert value("stepkeeper_committed_step") == 3
    assert value("stepkeeper_save_stall_seconds_count") == 4
    assert [value(f"stepkeeper_save_{part}_seconds_count") for part in PARTS] == [2] * len(PARTS)
