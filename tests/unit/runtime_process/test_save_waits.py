"""A save that comes while others are in flight."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import pytest

from stepkeeper import loggers
from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import CompanionError, NoticeDeadlineError
from stepkeeper.save.hooks import SaveHooks
from stepkeeper.save.report import SaveReport
from stepkeeper.save.request import SaveRequest
from stepkeeper.save.saver import Saver
from stepkeeper.storage.memory import MemoryStore
from stepkeeper_planners.state.tree import flatten_state


class SlowCompanion:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def ensure_process(self) -> None:
        self.free.wait(60)
        raise CompanionError("nothing is written here")

    def claim_root(self, **_: object) -> None:
        self.ensure_process()


@pytest.fixture
def companion() -> Iterator[SlowCompanion]:
    companion = SlowCompanion()
    yield companion
    companion.free.set()


def saves_with(
    companion: SlowCompanion,
    max_pending: int,
    save_hooks: SaveHooks | None = None,
    waits: Waits | None = None,
) -> Saver:
    progress = Progress(lambda _state: None)
    return Saver(
        MemoryStore(),
        cast(Companion, companion),
        SoloRankGroup(),
        progress,
        max_pending=max_pending,
        save_hooks=save_hooks,
        waits=waits,
    )


@pytest.mark.parametrize("max_pending", [1, 2])
def test_one_more_than_may_be_in_flight_waits_for_the_oldest(
    companion: SlowCompanion, max_pending: int
) -> None:
    reports: list[SaveReport] = []
    save_hooks = SaveHooks()
    save_hooks.on_save(reports.append)
    saves = saves_with(companion, max_pending, save_hooks)
    begun = [saves.start_save(SaveRequest(step=step, state={"step": step})) for step in range(max_pending)]
    with pytest.raises(TimeoutError, match="step 0 was still in flight"):
        saves.start_save(SaveRequest(step=max_pending, state={"step": max_pending}), 0.0)
    assert not any(save.done for save in begun)
    freed_s: list[float] = []

    def free() -> None:
        freed_s.append(time.monotonic())
        companion.free.set()

    threading.Timer(0.05, free).start()
    waited = saves.start_save(SaveRequest(step=max_pending, state={"step": max_pending}))
    assert begun[0].done
    assert saves.wait_until_idle(60)
    assert save_hooks.await_hooks(60)
    assert [report.step for report in reports] == [*range(max_pending + 1)]
    assert waited.report is not None
    ended_s = waited.clock.began_s + waited.report.stall_s
    assert ended_s >= freed_s[0], "the wait is part of what the save cost"
    saves.close()


LONGEST_S = 20


def in_a_thread(call: Callable[[], object]) -> Future[object]:
    ended: Future[object] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except Exception as error:  # `result` raises it
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return ended


def test_a_save_waits_no_longer_for_one_that_another_thread_starts_than_for_memory(
    companion: SlowCompanion,
) -> None:
    waits, is_waiting = Waits(), threading.Event()

    def no_notice(_: float) -> None:
        is_waiting.set()

    waits.notice_left_s = no_notice
    saves = saves_with(companion, 1, waits=waits)
    saves.start_save(SaveRequest(step=1, state={"step": 1}))
    beside = in_a_thread(lambda: saves.start_save(SaveRequest(step=2, state={"step": 2})))
    assert is_waiting.wait(LONGEST_S), "for the memory of the first"
    due = in_a_thread(lambda: saves.start_save(SaveRequest(step=3, state={"step": 3}), 0.0))
    with pytest.raises(TimeoutError, match="another thread"):
        due.result(LONGEST_S)
    assert saves.newest_save is not None
    assert saves.newest_save.step == 1
    companion.free.set()
    beside.result(LONGEST_S)
    saves.close()


@pytest.mark.parametrize("is_due", [True, False])
def test_a_notice_ends_the_wait_for_a_save_that_another_thread_starts(
    companion: SlowCompanion, *, is_due: bool
) -> None:
    is_building, may_go_on, waits = threading.Event(), threading.Event(), Waits()

    def build() -> dict[str, object]:
        is_building.set()
        may_go_on.wait(60)
        return {"step": 1}

    saves = saves_with(companion, 1, waits=waits)
    beside = in_a_thread(lambda: saves.start_save(SaveRequest(step=1, state=build)))
    assert is_building.wait(LONGEST_S)
    waits.notice_left_s = lambda _since_s: 0.0
    call = (
        partial(saves.start_save, SaveRequest(step=2, state={}))
        if is_due
        else partial(saves.prepare, flatten_state({}))
    )
    try:
        with pytest.raises(NoticeDeadlineError):
            in_a_thread(call).result(LONGEST_S)
    finally:
        may_go_on.set()
    beside.result(LONGEST_S)
    companion.free.set()
    saves.close()


def test_what_a_failed_save_wrote_counts_for_nothing(companion: SlowCompanion) -> None:
    companion.free.set()
    saves = saves_with(companion, 1)
    failed = saves.start_save(SaveRequest(step=3, state={"step": 3}))
    assert saves.wait_until_idle(60)
    assert failed.report is not None
    assert (failed.report.sequence, failed.report.size_bytes, failed.report.total_bytes) == (None, 0, None)
    assert failed.report.error == "CompanionError: " + str(failed.future.exception())
    assert saves.cost is None, "a save that failed says nothing of what one costs"
    saves.close()


def told(records: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(records[name] for name in ("step", "attempt", "rank"))


def test_failures_are_told_with_step_attempt_and_rank(
    companion: SlowCompanion, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "_identity", {"attempt": None, "rank": None})
    loggers.identify(rank=0, attempt="1.0")
    companion.free.set()
    saves = saves_with(companion, 1, SaveHooks())
    saves.start_save(SaveRequest(step=3, state={"step": 3}))
    assert saves.wait_until_idle(60)
    (record,) = [each for each in caplog.records if each.name == "stepkeeper"]
    assert record.levelname == "ERROR"
    assert told(record.__dict__) == (3, "1.0", 0)
    assert isinstance(record.__dict__["save"], SaveReport)
    saves.close()
