"""Test what ends a pod's process that a notice reaches before there is a manager, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.contract import Termination

_POD = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from stepkeeper_testing.pod import pod_identity
from stepkeeper.training.notices.early_notice import heed_early_notices, leave_notices_to_manager
from stepkeeper.training.notices.signals import signal_watcher
from stepkeeper.training.notices.watcher import NoticeWatcher

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
    signal_watcher.process_pending_signals()

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


def last_word(folder: Path) -> Termination:
    return Termination.from_json((folder / "termination").read_bytes())


@pytest.mark.parametrize("wait", ["wait_deaf", "wait"])
@pytest.mark.parametrize(("tell", "notice"), [("tell", "sigterm"), ("trigger.touch", "file")])
def test_a_notice_ends_the_process_also_where_the_main_thread_hears_nothing(
    tmp_path: Path, wait: str, tell: str, notice: str
) -> None:
    waits = f"""
heed_early_notices(pod, trigger)
print("what was printed", end="")
threading.Timer(0.5, {tell}).start()
{wait}()
"""
    code, said = run(tmp_path, waits)
    assert code == 75, said
    assert "what was printed" in said
    assert f"notice ({notice}) before there is a manager" in said
    word = last_word(tmp_path)
    assert (word.code, word.notice, word.rank) == (75, notice, 1)


@pytest.mark.parametrize("method", ["file", "sigterm"])
def test_a_manager_takes_notices_over(tmp_path: Path, method: str) -> None:
    """The process isn't ended, and behind the manager it is as it was before all."""
    manages = f"""
heed_early_notices(pod, trigger)
watcher = NoticeWatcher(trigger, lambda: None, Heard())
watcher.start(signals=True)
{"tell" if method == "sigterm" else "trigger.touch"}()
assert Heard.any.wait(30)
time.sleep(0.5)
"""
    assert run(tmp_path, manages) == (0, f"{method}\n")


def test_behind_a_manager_without_a_notice_all_is_as_before_it(tmp_path: Path) -> None:
    closes = """
heed_early_notices(pod, trigger)
watcher = NoticeWatcher(trigger, lambda: None, Heard())
watcher.start(signals=True)
watcher.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == -1
assert threading.active_count() == 1
tell()
"""
    assert run(tmp_path, closes) == (-15, "")


@pytest.mark.parametrize(
    "handle",
    [
        "heard = []; signal.signal(signal.SIGTERM, lambda *_: heard.append(1)); heed_early_notices(pod, trigger)",
        "heard = []; heed_early_notices(pod, trigger); signal.signal(signal.SIGTERM, lambda *_: heard.append(1))",
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


def test_a_forked_worker_dies_of_sigterm_and_minds_no_file(tmp_path: Path) -> None:
    forks = """
heed_early_notices(pod, trigger)
worker = os.fork()
if worker == 0:
    wait()
leave_notices_to_manager()
trigger.touch()
time.sleep(0.5)
assert os.waitpid(worker, os.WNOHANG) == (0, 0)
os.kill(worker, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -15
"""
    assert run(tmp_path, forks) == (0, "")
