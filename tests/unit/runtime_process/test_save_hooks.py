"""Hooks for saves: whatever they do, no save waits for them, and none of them is left out."""

import asyncio
import threading
from typing import NoReturn, cast

import pytest

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import CompanionError
from stepkeeper.save.hooks import Events
from stepkeeper.save.report import SaveClock, SaveReport
from stepkeeper.save.request import SaveRequest
from stepkeeper.save.saver import Saver
from stepkeeper.storage.memory import MemoryStore


class NoCompanion:
    """Every save fails."""

    def claim_root(self, **_: object) -> NoReturn:
        raise CompanionError("nothing is written here")


def saves_with(events: Events) -> Saver:
    progress = Progress(lambda _state: None)
    companion = cast(Companion, NoCompanion())
    return Saver(MemoryStore(), companion, SoloRankGroup(), progress, max_pending=1, events=events)


def report_of(step: int) -> SaveReport:
    return SaveClock().report(step, size_bytes=0, sequence=step)


def test_a_hook_may_wait_for_the_save_that_it_is_told_of() -> None:
    events, ended = Events(), []
    saves = saves_with(events)

    def ask(_: SaveReport) -> None:
        assert saves.last_begun is not None
        ended.append((saves.wait(5), type(saves.last_begun.future.exception(5))))

    events.on_save(ask)
    saves.start_save(SaveRequest(step=3, state={"step": 3}))
    saves.close()
    assert events.finish(60)
    assert ended == [(True, CompanionError)]


def test_no_save_waits_for_a_hook() -> None:
    events, told = Events(), []
    free = threading.Event()

    def wait(report: SaveReport) -> None:
        free.wait(60)
        told.append(report.step)

    events.on_save(wait)
    saves = saves_with(events)
    for step in range(3):
        saves.start_save(SaveRequest(step=step, state={"step": step}), 10.0)
    assert saves.wait(10)
    assert told == []
    free.set()
    assert events.finish(60)
    assert told == [0, 1, 2]
    saves.close()


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_hooks_are_called_in_order_whatever_one_of_them_raises(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: SaveReport) -> NoReturn:
        raise error

    events = Events()
    told: list[tuple[str, int]] = []
    first = events.on_save(lambda report: told.append(("first", report.step)))
    events.on_save(fail)
    events.on_save(lambda report: told.append(("last", report.step)))
    events.saved(report_of(1))
    first()
    first()
    events.saved(report_of(2))
    assert events.finish(60)
    events.saved(report_of(3))
    assert events.finish(60)
    assert told == [("first", 1), ("last", 1), ("last", 2), ("last", 3)]
    failed = [each for each in caplog.records if "a hook for saves failed" in each.getMessage()]
    assert [each.__dict__["step"] for each in failed] == [1, 2, 3]


def test_a_hook_that_hangs_is_waited_for_only_so_long(caplog: pytest.LogCaptureFixture) -> None:
    events, free = Events(), threading.Event()
    events.on_save(lambda _: free.wait(60))
    events.saved(report_of(1))
    assert not events.finish(0.01)
    assert "still running after 0.0 s" in caplog.text
    free.set()
    assert events.finish(60)


def test_a_hook_that_closes_the_manager_waits_for_no_hook() -> None:
    events, finished = Events(), []
    events.on_save(lambda _: finished.append(events.finish(60)))
    events.saved(report_of(1))
    assert events.finish(60)
    assert finished == [True]


def test_who_waits_while_the_thread_is_being_started_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    events, told, finished = Events(), [], []
    events.on_save(lambda report: told.append(report.step))
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        finished.append(events.finish(60))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched)
    events.saved(report_of(1))
    assert events.finish(60)
    assert (told, finished) == ([1], [True])


def test_without_hooks_there_is_no_thread() -> None:
    events = Events()
    events.on_save(lambda _: None)()
    before = threading.active_count()
    events.saved(report_of(1))
    assert threading.active_count() == before
