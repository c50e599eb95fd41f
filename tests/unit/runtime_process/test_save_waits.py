"""A save that comes while others are in flight."""

import threading
import time
from collections.abc import Iterator

import pytest

from stepkeeper.errors import CompanionError
from stepkeeper.save.hooks import SaveHooks
from stepkeeper.save.report import SaveReport
from stepkeeper.save.request import SaveRequest
from stepkeeper_testing.saves import saver_with


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


@pytest.mark.parametrize("max_pending", [1, 2])
def test_one_more_than_may_be_in_flight_waits_for_the_oldest(
    companion: SlowCompanion, max_pending: int
) -> None:
    reports: list[SaveReport] = []
    save_hooks = SaveHooks()
    save_hooks.on_save(reports.append)
    saves = saver_with(companion, max_pending=max_pending, save_hooks=save_hooks)
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
