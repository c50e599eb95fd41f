"""Hooks for saves: whatever they do, no save waits for them, and none of them is left out."""

import asyncio
import threading
from typing import NoReturn

import pytest

from stepkeeper.errors import CompanionError
from stepkeeper.save.hooks import SaveHooks
from stepkeeper.save.report import SaveClock, SaveReport
from stepkeeper.save.request import SaveRequest
from stepkeeper_testing.saves import saver_with


class NoCompanion:
    """Every save fails."""

    def claim_root(self, **_: object) -> NoReturn:
        raise CompanionError("nothing is written here")


def report_of(step: int) -> SaveReport:
    return SaveClock().build_report(step, size_bytes=0, sequence=step)


def test_no_save_waits_for_a_hook() -> None:
    save_hooks, told = SaveHooks(), []
    free = threading.Event()

    def wait(report: SaveReport) -> None:
        free.wait(60)
        told.append(report.step)

    save_hooks.on_save(wait)
    saves = saver_with(NoCompanion(), save_hooks=save_hooks)
    for step in range(3):
        saves.start_save(SaveRequest(step=step, state={"step": step}), 10.0)
    assert saves.wait_until_idle(10)
    assert told == []
    free.set()
    assert save_hooks.await_hooks(60)
    assert told == [0, 1, 2]
    saves.close()


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
