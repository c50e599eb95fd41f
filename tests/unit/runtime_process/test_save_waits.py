"""A save that comes while others are in flight."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import cast

import pytest

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
