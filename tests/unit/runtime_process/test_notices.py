"""What counts as a notice: real signals to this process, files, and what the cloud announces for its machine."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import stepkeeper.torch_xla as xc
from stepkeeper import loggers
from stepkeeper.contract import Cause, NoticeSource
from stepkeeper.ending import notices as module
from stepkeeper.ending.data_loaders import interrupts_a_step, tolerate_worker_exits
from stepkeeper.ending.notices import Notices
from stepkeeper.ending.schedule import Notice, Schedule
from stepkeeper.ending.signals import SignalWatcher
from stepkeeper.training.cloud.announcements import Announcements, save_lead_s
from stepkeeper.training.cloud.cloud_notices import CloudNotice, read_cloud_notice


class HeardNotices:
    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.any = threading.Event()

    def __call__(self, notice: Notice) -> None:
        self.notices.append(notice)
        self.any.set()

    def watch(
        self, trigger: Path | None = None, tick: Callable[[], None] = lambda: None, *, signals: bool = True
    ) -> Notices:
        watcher = Notices(Schedule(grace_s=None), trigger=trigger, on_first=self, on_tick=tick)
        watcher.start(signals=signals)
        return watcher

    def sources(self) -> list[str]:
        """Of all, once there is any."""
        assert self.any.wait(60)
        return [notice.source for notice in self.notices]


def tell() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def heard() -> HeardNotices:
    return HeardNotices()


@pytest.fixture(autouse=True)
def fresh_watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Watch signals as in a process without a notice, and leave no handler to later tests.

    The process's own watcher may be active, of a manager that was never closed: it would get each SIGTERM.
    """
    monkeypatch.setattr(module, "signal_watcher", SignalWatcher())
    monkeypatch.setattr(loggers, "_BRIEF_S", 60.0)
    wakeup_fd, handler = signal.set_wakeup_fd(-1), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    children = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, children)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.set_wakeup_fd(wakeup_fd)


def test_sigterm_is_a_notice_and_the_handler_before_is_called_too(heard: HeardNotices) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    watcher = heard.watch()
    tell()
    assert heard.sources() == ["sigterm"]
    assert called == [signal.SIGTERM]
    watcher.close()
    tell()
    assert called == [signal.SIGTERM] * 2, "told again while it ends, the process lives"


def test_a_tick_that_raises_does_not_end_the_watch(heard: HeardNotices, tmp_path: Path) -> None:
    def tick() -> None:
        raise RuntimeError("the buffer was donated")

    watcher = heard.watch(tmp_path / "notice", tick)
    assert not heard.any.wait(0.5), "it has ticked"
    tell()
    assert heard.sources() == ["sigterm"]
    watcher.record(NoticeSource.CALL)
    assert watcher.first == heard.notices[-1], "the first notice counts"
    watcher.close()


def test_sigterm_is_heard_after_an_event_loop_has_taken_the_wakeup(heard: HeardNotices) -> None:
    watcher = heard.watch()

    async def listen_too() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)

    asyncio.run(listen_too())
    tell()
    assert heard.sources() == ["sigterm"]
    watcher.close()


def test_an_event_loop_that_listens_before_keeps_its_signals(heard: HeardNotices) -> None:
    async def train() -> Notices:
        called = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, called.set)
        watcher = heard.watch()
        os.kill(os.getpid(), signal.SIGUSR1)
        await called.wait()
        tell()
        return watcher

    watcher = asyncio.run(train())
    assert heard.sources() == ["sigterm"]
    watcher.close()


@pytest.mark.parametrize("is_closed", [True, False])
def test_behind_the_last_watcher_sigterm_is_what_it_was(heard: HeardNotices, is_closed: bool) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    watcher = heard.watch()
    theirs = signal.getsignal(signal.SIGTERM)
    assert callable(theirs)
    # Other code wraps the handler, so that it can't be uninstalled.
    signal.signal(signal.SIGTERM, partial(theirs))
    second = heard.watch()
    if is_closed:
        watcher.close()
        second.close()
    held = weakref.ref(watcher)
    del watcher, second
    gc.collect()
    assert held() is None
    tell()
    assert called == [signal.SIGTERM]
    assert not heard.notices


_TAKES_SIGTERM = """
import ctypes, logging, os, signal, threading
from stepkeeper.ending import sigterm_handler
from stepkeeper.ending.notices import Notices
from stepkeeper.ending.schedule import Schedule
from stepkeeper.ending.signals import signal_watcher

logging.basicConfig(level=logging.INFO)
heard = threading.Event()
watcher = Notices(
    Schedule(grace_s=None), trigger=None, on_first=lambda notice: heard.set(), on_tick=lambda: None
)
watcher.start(signals=True)
libc = ctypes.CDLL(None)
# It ends the process with the number of the signal.
theirs = sigterm_handler._Action(handler=ctypes.cast(libc._exit, ctypes.c_void_p), flags=FLAGS)
for _ in range(2):
    libc.sigaction(signal.SIGTERM, ctypes.byref(theirs), None)
    signal_watcher.read_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
assert heard.wait(60)
"""


@pytest.mark.parametrize(
    ("flags", "code", "who"),
    [
        pytest.param(4, 0, "only the training gets", id="with three arguments: it isn't called"),
        pytest.param(0, signal.SIGTERM, "both get", id="with one: it is called too"),
    ],
)
def test_sigterm_is_taken_back_from_code_in_c(flags: int, code: int, who: str) -> None:
    script = _TAKES_SIGTERM.replace("FLAGS", str(flags))
    ended = subprocess.run(
        [sys.executable, "-c", script], timeout=120, check=False, capture_output=True, text=True
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count(f"{who} SIGTERM") == 1


def test_who_began_in_another_thread_has_sigterm_from_the_first_call_in_the_main_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = xc.CheckpointManager(tmp_path, 10**6)
    for _ in range(2):
        aside = threading.Thread(target=manager.should_save, args=(1,))
        aside.start()
        aside.join()
    assert signal.getsignal(signal.SIGTERM) == before
    assert caplog.text.count("SIGTERM ends this process without a save") == 1
    manager.should_save(2)
    assert signal.getsignal(signal.SIGTERM) != before
    tell()
    assert manager._parts.ending.notices.read_first() is not None
    assert manager.health().notice == "sigterm"
    manager.close()


def test_a_notice_of_one_that_has_ended_is_the_next_ones_too(heard: HeardNotices) -> None:
    first = HeardNotices().watch()
    tell()
    notice = first.read_first()
    first.close()
    second = heard.watch()
    assert second.read_first() == notice, "the grace period began when the signal came"
    second.close()
    assert len(heard.notices) == 1


def test_a_rank_that_waits_for_a_batch_is_between_its_updates() -> None:
    def end(*_: object) -> None:
        raise RuntimeError("a worker has ended")

    signal.signal(signal.SIGUSR1, end)
    with pytest.raises(RuntimeError) as within:
        signal.raise_signal(signal.SIGUSR1)
    assert interrupts_a_step(within.value)

    class Data:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            signal.raise_signal(signal.SIGUSR1)
            return index

    data: Any = Data()
    with pytest.raises(RuntimeError) as between:
        next(iter(DataLoader(data)))
    assert not interrupts_a_step(between.value)


def test_what_a_handler_for_children_raises_ends_nothing_within(caplog: pytest.LogCaptureFixture) -> None:
    # Children of other tests may end at any time: only this test's signal is answered.
    told: list[bool] = [False]

    def end(number: int, frame: object) -> None:
        if told[-1]:
            raise RuntimeError("a worker has ended")

    signal.signal(signal.SIGCHLD, end)
    with tolerate_worker_exits():
        told.append(True)
        signal.raise_signal(signal.SIGCHLD)
        told.append(False)
    assert "a worker has ended" in caplog.text
    assert signal.getsignal(signal.SIGCHLD) is end


NOW_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


MAINTENANCE = CloudNotice(cause=Cause.MAINTENANCE, begins_unix_s=None)


def maintenance_in(left_s: float) -> CloudNotice:
    return CloudNotice(cause=Cause.MAINTENANCE, begins_unix_s=NOW_S + left_s)


@pytest.mark.parametrize(
    ("key", "text", "notice"),
    [
        ("preempted", "TRUE", CloudNotice(cause=Cause.SPOT_PREEMPTION, begins_unix_s=None)),
        ("maintenance-event", "NONE", None),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", MAINTENANCE),
        ("upcoming-maintenance", "{}", None),
        ("upcoming-maintenance", "no maintenance", None),
        ("upcoming-maintenance", '{"window_start_time": "soon"}', None),
        ("upcoming-maintenance", "[" * 60_000, None),
        ("upcoming-maintenance", '{"window_start_time": "0001-01-01T00:00:00"}', None),
        ("upcoming-maintenance", '{"window_start_time": "2026-01-01T00:01:00Z"}', maintenance_in(60)),
        ("upcoming-maintenance", '{"windowStartTime": "2026-01-01T01:01:00+01:00"}', maintenance_in(60)),
    ],
)
def test_what_the_metadata_server_says_is_read(key: str, text: str, notice: CloudNotice | None) -> None:
    assert read_cloud_notice(key, text) == notice


class Training:
    """Note what announcements ask of it."""

    def __init__(self, save_s: float | None = None) -> None:
        self.asked: list[str] = []
        self.now_s = NOW_S
        self.announcements = Announcements(
            stop=lambda: self.asked.append("stop"),
            save=self.asked.append,
            save_s=lambda: save_s,
            now_unix_s=lambda: self.now_s,
        )


@pytest.mark.parametrize(("save_s", "lead_s"), [(None, 300), (1.0, 60), (30.0, 90)])
def test_a_maintenance_far_ahead_is_saved_for_shortly_before_it_and_once(
    save_s: float | None, lead_s: int
) -> None:
    training = Training(save_s)
    training.announcements.take_over("upcoming-maintenance", maintenance_in(3600))
    training.now_s = NOW_S + 3600 - lead_s - 1
    training.announcements.check()
    assert training.asked == []
    training.now_s += 1
    for _ in range(3):
        training.announcements.check()
    assert training.asked == [f"maintenance/{int(NOW_S) + 3600}"]
    assert save_lead_s(save_s) == lead_s


def test_a_maintenance_explains_an_end_only_when_it_is_near() -> None:
    training = Training()
    training.announcements.take_over("upcoming-maintenance", maintenance_in(3600))
    assert training.announcements.cause is None
    training.now_s += 3500
    assert training.announcements.cause is Cause.MAINTENANCE
    training.now_s += 100 + 3600
    assert training.announcements.cause is Cause.MAINTENANCE
    # It isn't withdrawn: a server without anything to announce may answer with an error.
    training.now_s += 1
    assert training.announcements.cause is None
    training.now_s -= 1
    training.announcements.take_over("upcoming-maintenance", None)
    assert training.announcements.cause is None
