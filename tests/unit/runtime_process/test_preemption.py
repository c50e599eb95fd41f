"""Test what counts as a notice, with real signals to this process."""

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from stepkeeper import CheckpointManager, loggers
from stepkeeper.training.notices import watcher as module
from stepkeeper.training.notices.signals import SignalWatcher
from stepkeeper.training.notices.watcher import Notice, NoticeWatcher


class Heard:
    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.any = threading.Event()

    def __call__(self, notice: Notice) -> None:
        self.notices.append(notice)
        self.any.set()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    signal.set_wakeup_fd(-1)


@pytest.fixture(autouse=True)
def fresh_watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Watch signals as in a process that was never told to stop, and leave no SIGTERM to the tests after these.

    The process's own watcher may be at work, of a manager that nobody has closed: it would be handed each SIGTERM on.
    """
    monkeypatch.setattr(module, "signal_watcher", SignalWatcher())
    monkeypatch.setattr(loggers, "_TELL_S", 60.0)
    wakeup_fd, handler = signal.set_wakeup_fd(-1), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
    signal.set_wakeup_fd(wakeup_fd)


def test_sigterm_is_a_notice_and_the_handler_before_is_called_too(heard: Heard) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    watcher = NoticeWatcher(None, lambda: None, heard)
    watcher.start(signals=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.any.wait(60)
    assert [notice.source for notice in heard.notices] == ["sigterm"]
    assert called == [signal.SIGTERM]
    watcher.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == [signal.SIGTERM] * 2, "told again while it ends, the process lives"


def test_who_watched_the_wakeup_before_still_gets_it(heard: Heard) -> None:
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(write_fd)
    watcher = NoticeWatcher(None, lambda: None, heard)
    watcher.start(signals=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.any.wait(60)
    assert select.select([read_fd], [], [], 10)[0]
    assert os.read(read_fd, 10) == bytes([signal.SIGTERM])
    watcher.close()
    os.close(read_fd)
    os.close(write_fd)


def test_a_file_is_a_notice_and_the_first_notice_counts(heard: Heard, tmp_path: Path) -> None:
    trigger = tmp_path / "notice"
    watcher = NoticeWatcher(trigger, lambda: None, heard)
    watcher.start(signals=False)
    trigger.touch()
    assert heard.any.wait(60)
    watcher.record_notice("call")
    assert [notice.source for notice in heard.notices] == ["file"]
    assert watcher.notice == heard.notices[0]
    watcher.close()


def test_a_tick_or_a_listener_that_raises_does_not_end_the_watch(tmp_path: Path) -> None:
    heard = Heard()

    def tick() -> None:
        raise RuntimeError("the buffer was donated")

    def listen(notice: Notice) -> None:
        heard(notice)
        raise OSError("no space")

    watcher = NoticeWatcher(tmp_path / "notice", tick, listen)
    watcher.start(signals=True)
    assert not heard.any.wait(0.5), "it has ticked"
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.any.wait(60)
    assert [notice.source for notice in heard.notices] == ["sigterm"]
    assert watcher.read_notice() == heard.notices[0], "it goes on"
    watcher.close()


def test_sigterm_is_heard_after_an_event_loop_has_taken_the_wakeup(heard: Heard) -> None:
    watcher = NoticeWatcher(None, lambda: None, heard)
    watcher.start(signals=True)

    async def listen_too() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)

    asyncio.run(listen_too())
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.any.wait(60)
    assert [notice.source for notice in heard.notices] == ["sigterm"]
    watcher.close()


@pytest.mark.parametrize("is_closed", [True, False])
def test_behind_the_last_watcher_sigterm_is_what_it_was(heard: Heard, is_closed: bool) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    watcher = NoticeWatcher(None, lambda: None, heard)
    watcher.start(signals=True)
    theirs = signal.getsignal(signal.SIGTERM)
    assert callable(theirs)
    # Somebody wraps the handler, so that it can't be taken out any more.
    signal.signal(signal.SIGTERM, partial(theirs))
    second = NoticeWatcher(None, lambda: None, heard)
    second.start(signals=True)
    if is_closed:
        watcher.close()
        second.close()
    held = weakref.ref(watcher)
    del watcher, second
    gc.collect()
    assert held() is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == [signal.SIGTERM]
    assert not heard.notices


_TAKES_SIGTERM = """
import ctypes, logging, os, signal, threading
from stepkeeper.training.notices import sigterm_handler
from stepkeeper.training.notices.watcher import NoticeWatcher
from stepkeeper.training.notices.signals import signal_watcher

logging.basicConfig(level=logging.INFO)
heard = threading.Event()
watcher = NoticeWatcher(None, lambda: None, lambda notice: heard.set())
watcher.start(signals=True)
libc = ctypes.CDLL(None)
# It ends the process with the number of the signal.
theirs = sigterm_handler._Action(handler=ctypes.cast(libc._exit, ctypes.c_void_p), flags=4)
for _ in range(2):
    libc.sigaction(signal.SIGTERM, ctypes.byref(theirs), None)
    signal_watcher.process_pending_signals()
os.kill(os.getpid(), signal.SIGTERM)
assert heard.wait(60)
"""


def test_sigterm_is_taken_back_from_code_in_c_that_would_end_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _TAKES_SIGTERM], timeout=120, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("only the training hears of it") == 1


def test_who_began_in_another_thread_has_sigterm_from_the_first_call_in_the_main_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = CheckpointManager(tmp_path, 10**6)
    for _ in range(2):
        aside = threading.Thread(target=manager.should_save, args=(1,))
        aside.start()
        aside.join()
    assert signal.getsignal(signal.SIGTERM) == before
    assert caplog.text.count("SIGTERM ends this process without a save") == 1
    manager.should_save(2)
    assert signal.getsignal(signal.SIGTERM) != before
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager._parts.controller.notices.read_notice() is not None
    assert manager.health().notice == "sigterm"
    manager.close()


def test_a_notice_of_one_that_has_ended_is_the_next_ones_too(heard: Heard) -> None:
    first = NoticeWatcher(None, lambda: None, Heard())
    first.start(signals=True)
    os.kill(os.getpid(), signal.SIGTERM)
    notice = first.read_notice()
    first.close()
    second = NoticeWatcher(None, lambda: None, heard)
    second.start(signals=True)
    assert second.read_notice() == notice, "the grace period began when the signal came"
    second.close()
    assert len(heard.notices) == 1


_ENDS_SLOWLY = """
import json, os, signal
from stepkeeper.training.notices.watcher import NoticeWatcher

watcher = NoticeWatcher(None, lambda: None, lambda notice: None)
watcher.start(signals=True)
if TOLD:
    os.kill(os.getpid(), signal.SIGTERM)
watcher.close()

class Told:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

json.kept = Told()  # a module's values go when Python has given up its signal handlers
raise SystemExit(75)
"""


@pytest.mark.parametrize(("told", "code"), [(True, 75), (False, -signal.SIGTERM)])
def test_a_process_that_ends_for_a_notice_ends_with_its_code_however_often_it_is_told(
    told: bool, code: int
) -> None:
    script = _ENDS_SLOWLY.replace("TOLD", str(told))
    assert subprocess.run([sys.executable, "-c", script], timeout=200, check=False).returncode == code
