"""What processes of their own end with, and what a start costs: each of these runs a program."""

import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import ForkServer

from stepkeeper.contract import Termination

_POD = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from stepkeeper_testing.pod import pod_identity
from stepkeeper.ending.before_manager import exit_at_early_notice
from stepkeeper.ending.notices import Notices
from stepkeeper.ending.schedule import Schedule
from stepkeeper.ending.signals import signal_watcher

folder = Path(sys.argv[1])
trigger = folder / "notice"
pod = pod_identity(host_index=1, hosts_per_slice=2, termination_file=str(folder / "termination"))

def wait():
    time.sleep(60)

def wait_deaf():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

def tell():
    os.kill(os.getpid(), signal.SIGTERM)
    signal_watcher.read_sigterm()

class Heard:
    any = threading.Event()
    def __call__(self, notice):
        print(notice.source)
        self.any.set()

"""


def run(folder: Path, script: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", _POD + script, str(folder)],
        timeout=200,
        check=False,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("wait", ["wait_deaf", "wait"])
@pytest.mark.parametrize(("tell", "notice"), [("tell", "sigterm"), ("trigger.touch", "file")])
def test_a_notice_ends_the_process_also_where_the_main_thread_hears_nothing(
    tmp_path: Path, wait: str, tell: str, notice: str
) -> None:
    waits = f"""
exit_at_early_notice(pod, trigger)
print("what was printed", end="")
threading.Timer(0.5, {tell}).start()
{wait}()
"""
    code, said = run(tmp_path, waits)
    assert code == 75, said
    assert "what was printed" in said
    assert f"notice ({notice}) before a manager exists" in said
    word = Termination.from_json((tmp_path / "termination").read_bytes())
    assert (word.code, word.notice, word.rank) == (75, notice, 1)


@pytest.mark.parametrize("method", ["file", "sigterm"])
def test_a_manager_takes_notices_over(tmp_path: Path, method: str) -> None:
    """The process isn't ended, and after the manager its handlers are as before."""
    manages = f"""
exit_at_early_notice(pod, trigger)
watcher = Notices(Schedule(grace_s=None), trigger=trigger, on_first=Heard(), on_tick=lambda: None)
watcher.start(signals=True)
{"tell" if method == "sigterm" else "trigger.touch"}()
assert Heard.any.wait(30)
time.sleep(0.5)
"""
    assert run(tmp_path, manages) == (0, f"{method}\n")


@pytest.mark.parametrize(
    "handle",
    [
        "heard = []; signal.signal(signal.SIGTERM, lambda *_: heard.append(1)); exit_at_early_notice(pod, trigger)",
        "heard = []; exit_at_early_notice(pod, trigger); signal.signal(signal.SIGTERM, lambda *_: heard.append(1))",
    ],
    ids=["before", "later"],
)
def test_a_handler_of_the_program_decides(tmp_path: Path, handle: str) -> None:
    told = f"""
{handle}
trigger.touch()
tell()
time.sleep(0.5)
assert len(heard) == 1
"""
    code, said = run(tmp_path, told)
    assert code == 0, said


@pytest.mark.parametrize(("ends", "code"), [("sys.exit(78)", 78), ("catch_it()", 15)])
def test_sigterm_changes_no_exit_code_of_a_process_that_ends(tmp_path: Path, ends: str, code: int) -> None:
    """A program that catches the exception and trains on with another manager may end by the signal again."""
    told = f"""
def manage():
    watcher = Notices(Schedule(grace_s=None), trigger=None, on_first=Heard(), on_tick=lambda: None)
    watcher.start(signals=True)
    return watcher

def catch_it():
    manage().close()
    tell()

watcher = manage()
watcher.keep_exit_code(78)
watcher.close()
tell()
{ends}
"""
    assert run(tmp_path, told) == (-code if code == 15 else code, "")


BEGIN = """
import json, threading, time
from stepkeeper.ending.exits import exit_at

class LongEnd:
    def __del__(self, sleep=time.sleep):
        sleep(60)
"""


ENDS = {
    "the time is over already": ("exit_at(time.monotonic(), 75); time.sleep(60)", 75),
    "the interpreter is taken down": ("exit_at(time.monotonic() + 0.2, 75); json.kept = LongEnd()", 75),
    "cancelled": ("exit_at(time.monotonic() + 0.5, 75)(); time.sleep(1)", 0),
    "it ends before by itself": ("exit_at(time.monotonic() + 60, 75)", 0),
}


@pytest.mark.parametrize(("script", "code"), ENDS.values(), ids=ENDS)
def test_the_process_ends_with_the_code_unless_it_is_cancelled(script: str, code: int) -> None:
    process = subprocess.run([sys.executable, "-c", BEGIN + script], timeout=200, check=False)
    assert process.returncode == code


_PROGRAM = """
import sys
import threading
from datetime import timedelta
from torch.distributed import TCPStore
from stepkeeper.coordination.store_rank_group import StoreRankGroup

store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))
group = StoreRankGroup(store, 0, 1)

def look():
    while True:
        group.read_proposal("nobody-proposed")

for _ in range(int(sys.argv[1])):
    threading.Thread(target=look, daemon=True).start()
threading.Event().wait(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("n_threads", "after_s"), [(8, 0.05), (64, 0.0)], ids=["talking", "connecting"])
def test_a_process_with_threads_in_the_store_does_not_abort_at_its_end(
    n_threads: int, after_s: float, torch_server: ForkServer, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    ends = [torch_server.run([program, n_threads, after_s]) for _ in range(3)]
    assert [end.returncode for end in ends] == [0, 0, 0], ends
