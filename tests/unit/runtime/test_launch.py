"""What the launcher of a pod tells torchrun, and which exit code it ends with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from stepkeeper.contract import Termination
from stepkeeper.launch.last_word import choose_exit_code
from stepkeeper.launch.ranks import children_of
from stepkeeper.launch.torchrun import read_torchrun_error, torchrun_variables
from stepkeeper.testing.pod import pod_environ, pod_identity

POD = pod_environ(
    pod_identity(slice_index=1, host_index=1, n_slices=2, hosts_per_slice=2, coordinator="lm-w-0-0.lm")
)


@pytest.mark.parametrize(
    ("code", "last_word", "meant"),
    [
        (1, 75, 75),
        (1, 77, 77),
        (1, 78, 78),
        (1, 3, 3),
        (137, 75, 75),
        (1, None, 1),
        (0, None, 0),
        # The launcher has started its processes anew, and they have come to the end.
        (0, 1, 0),
        # The training was done, and something else of the pod failed.
        (1, 0, 1),
    ],
)
def test_the_training_has_the_last_word_where_its_launcher_fails(
    code: int, last_word: int | None, meant: int
) -> None:
    word = None if last_word is None else Termination(code=last_word)
    assert choose_exit_code(code, word, was_told=True) == meant
    assert choose_exit_code(code, word, was_told=False) == meant


@pytest.mark.parametrize(
    ("code", "notice", "was_told", "meant"),
    [
        (1, "sigterm", True, 75),
        (1, "sigterm", False, 1),
        (137, "sigterm", False, 137),
        # Others than the launcher told it.
        (1, "directive", False, 75),
        (1, "peer", False, 75),
    ],
)
def test_a_process_that_its_launcher_stopped_for_the_failure_of_another_has_no_say(
    code: int, notice: str, was_told: bool, meant: int
) -> None:
    assert choose_exit_code(code, Termination(code=75, notice=notice), was_told=was_told) == meant


def test_a_process_that_stopped_with_all_others_was_not_stopped_for_the_failure_of_one() -> None:
    word = Termination(code=75, notice="sigterm", agreed=True)
    assert choose_exit_code(1, word, was_told=False) == 75
    assert choose_exit_code(0, word, was_told=False) == 0


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"message": {"message": "DistNetworkError: Failed to recv, got 0 bytes.", "extraInfo": {}}}, 78),
        ({"message": "DistNetworkError: Connection reset by peer"}, 78),
        ({"message": {"message": "SignalException: Process 7 got signal: 15"}}, 75),
        # Nobody was there, so nobody went away.
        ({"message": {"message": "DistNetworkError: The client socket has timed out after 900000ms"}}, None),
        ({"message": {"message": "ValueError: the loss is no number"}}, None),
        ({"message": 3}, None),
        ({}, None),
        ([], None),
    ],
)
def test_a_torchrun_without_a_training_says_that_it_was_stopped_or_has_lost_a_peer(
    tmp_path: Path, said: object, code: int | None
) -> None:
    file = tmp_path / "error.json"
    assert read_torchrun_error(file) is None
    file.write_text(json.dumps(said))
    word = read_torchrun_error(file)
    assert (None if word is None else word.code) == code


def test_a_signal_after_the_end_of_the_command_changes_nothing() -> None:
    script = (
        "import os, signal; from stepkeeper.launch.child import run; "
        "end = run(['sh', '-c', 'exit 3'], os.environ, grace_s=1)"
    )
    late = f"{script}; os.kill(os.getpid(), signal.SIGTERM); print(end.code, end.was_told)"
    done = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3 False\n"), done.stderr


def test_a_signal_while_the_interpreter_ends_changes_nothing() -> None:
    script = """
import os, signal, sys
from stepkeeper.launch.child import run

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGTERM):
        kill(pid, signum)

last = Last()
sys.exit(run(["sh", "-c", "exit 3"], os.environ, grace_s=1).code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr


def test_a_process_that_ends_while_its_children_are_listed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do those that a shell has started: the launcher looks through all of them for the ranks of a torchrun."""

    def end(path: object) -> NoReturn:
        raise ProcessLookupError(path)

    monkeypatch.setattr(os, "scandir", end)
    assert list(children_of(os.getpid())) == []


@pytest.mark.parametrize("how", ["in-another-thread", "blocked", "children-ignored", "after-the-look"])
def test_a_signal_is_handed_on_however_it_comes(how: str) -> None:
    """The command waits for SIGTERM, and the launcher gets that where a handler of Python's wouldn't be run for it."""
    script = f"""
import os, signal, sys, threading
from stepkeeper.launch import child

def tell():
    if {how == "in-another-thread"}:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)

def tell_when_ready():
    os.read(ready, 1)
    tell()

def look_and_be_told(pid):
    found = look(pid)
    if found is None and os.get_blocking(ready) and os.read(ready, 1):
        os.set_blocking(ready, False)
        tell()
    return found

ready, write = os.pipe()
if {how == "blocked"}:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
if {how == "children-ignored"}:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if {how == "after-the-look"}:
    look, child._bury = child._bury, look_and_be_told
else:
    threading.Thread(target=tell_when_ready, daemon=True).start()
os.set_inheritable(write, True)
command = "trap 'exit 7' TERM; echo >&$FD; while :; do sleep 0.05; done"
start = child.subprocess.Popen
child.subprocess.Popen = lambda command, env: start(command, env=env, close_fds=False)
end = child.run(["sh", "-c", command], os.environ | {{"FD": str(write)}}, grace_s=600)
print(end.code, end.was_told)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "7 True\n"), done.stderr


def test_torchrun_is_told_the_hosts_over_all_slices() -> None:
    assert torchrun_variables(POD) == {
        "PET_NNODES": "4",
        "PET_NODE_RANK": "3",
        "PET_MASTER_ADDR": "lm-w-0-0.lm",
        "PET_MASTER_PORT": "29500",
    }


def test_what_the_template_says_stays() -> None:
    told = torchrun_variables(POD | {"PET_MASTER_PORT": "1234"})
    assert sorted(told) == ["PET_MASTER_ADDR", "PET_NNODES", "PET_NODE_RANK"]
    assert torchrun_variables({}) == {}
