"""Test what ends a process that waits for others before there is a manager, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

_WAITS = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from stepkeeper.distributed.early_notice import leaving_on_notice

def wait():
    time.sleep(60)

def wait_deaf():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

def tell():
    os.kill(os.getpid(), signal.SIGTERM)

trigger = Path(sys.argv[1])
"""


@pytest.mark.parametrize(("wait", "tell"), [("wait_deaf", "tell"), ("wait", "trigger.touch")])
def test_a_notice_ends_the_wait_also_where_the_main_thread_hears_nothing(
    tmp_path: Path, wait: str, tell: str
) -> None:
    waits = f"""
with leaving_on_notice(trigger):
    threading.Timer(0.5, {tell}).start()
    {wait}()
"""
    command = [sys.executable, "-c", _WAITS + waits, str(tmp_path / "notice")]
    assert subprocess.run(command, timeout=200, check=False).returncode == 75


def test_a_file_that_was_there_before_is_a_notice_and_behind_the_wait_nothing_is_left(tmp_path: Path) -> None:
    trigger = tmp_path / "notice"
    passes = """
with leaving_on_notice(trigger):
    pass
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == -1
assert threading.active_count() == 1
with leaving_on_notice(trigger):
    trigger.touch()
    wait()
"""
    command = [sys.executable, "-c", _WAITS + passes, str(trigger)]
    assert subprocess.run(command, timeout=200, check=False).returncode == 75
