"""What counts as a notice, with real signals to this process."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.preemption import Notice, NoticeWatcher


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


def test_sigterm_is_a_notice_and_the_handler_before_is_called_too(heard: Heard) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    watcher = NoticeWatcher(None, lambda: None, heard)
    watcher.start(signals=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.any.wait(10)
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
    assert heard.any.wait(10)
    assert os.read(read_fd, 10) == bytes([signal.SIGTERM])
    watcher.close()
    os.close(read_fd)
    os.close(write_fd)


def test_without_a_notice_signals_are_given_back(heard: Heard) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, before)
    watcher = NoticeWatcher(None, lambda: None, heard)
    watcher.start(signals=True)
    assert signal.getsignal(signal.SIGTERM) != before
    watcher.close()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_file_is_a_notice_and_the_first_notice_counts(heard: Heard, tmp_path: Path) -> None:
    trigger = tmp_path / "notice"
    watcher = NoticeWatcher(trigger, lambda: None, heard)
    watcher.start(signals=False)
    trigger.touch()
    assert heard.any.wait(10)
    watcher.give("call")
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
    assert heard.any.wait(10)
    assert watcher._thread.is_alive()
    watcher.close()


def test_sigterm_is_heard_after_an_event_loop_has_taken_the_wakeup(heard: Heard) -> None:
    watcher = NoticeWatcher(None, lambda: None, heard)
    watcher.start(signals=True)

    async def listen_too() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)

    asyncio.run(listen_too())
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.any.wait(10)
    assert [notice.source for notice in heard.notices] == ["sigterm"]
    watcher.close()


def test_the_handler_before_does_not_end_the_process(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    watcher = NoticeWatcher(None, lambda: None, heard)
    watcher.start(signals=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.any.wait(10)
    watcher.close()
    assert "exit code 0" in caplog.text
