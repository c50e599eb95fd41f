"""What the launcher of a pod tells torchrun, and which exit code it ends with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.contract import Termination
from stepkeeper.launch.__main__ import torchrun_variables
from stepkeeper.launch.exit_code import choose_exit_code, read_torchrun_error
from stepkeeper.process_end import launcher_folder
from stepkeeper.process_end.kernel_record import KernelRecord
from stepkeeper.process_end.launcher_folder import list_ranks
from stepkeeper_testing.pod import pod_environ, pod_identity

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


@pytest.mark.parametrize(("was_told", "meant"), [(True, 0), (False, 1)])
def test_a_launcher_fails_after_a_training_that_was_done_only_if_nobody_told_it_to_stop(
    was_told: bool, meant: int
) -> None:
    """torchrun may get SIGTERM before it has seen that its processes have ended well."""
    assert choose_exit_code(1, Termination(code=0), was_told=was_told) == meant


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


_RUN = """
import os, signal, sys, tempfile
from pathlib import Path
from stepkeeper.launch.child import Child
from stepkeeper.process_end.launcher_folder import sign_on

folder = Path(tempfile.mkdtemp())
"""


def run_script(script: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN + script], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_a_signal_while_the_interpreter_ends_changes_nothing() -> None:
    script = """
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGTERM):
        kill(pid, signum)

last = Last()
sys.exit(Child(["sh", "-c", "exit 3"], os.environ, folder, 1).wait(lambda: False))
"""
    assert run_script(script) == (3, "")


@pytest.mark.parametrize(("name", "code"), [("TERM", 7), ("USR1", 8)])
def test_a_signal_is_handed_on_to_a_command_without_ranks(name: str, code: int) -> None:
    script = f"""
child = Child(["sh", "-c", "trap 'exit 7' TERM; trap 'exit 8' USR1; kill -{name} $PPID; while :; do sleep 0.05; done"],
              os.environ, folder, 600)
print(child.wait(lambda: False), child.was_told)
"""
    assert run_script(script) == (0, f"{code} {name == 'TERM'}\n")


_RANK = """
import os, signal, sys
from stepkeeper.process_end.launcher_folder import sign_on
signal.signal(signal.SIGTERM, lambda *_: (print("rank", flush=True), sys.exit(75)))
sign_on()
os.kill(int(sys.argv[1]), signal.SIGTERM)
while True:
    signal.pause()
"""


def test_sigterm_goes_to_the_ranks_and_to_the_command_once_they_have_ended() -> None:
    script = f"""
command = "trap 'echo command; exit 7' TERM; $0 -c \\"$RANK\\" $PPID; while :; do sleep 0.05; done"
child = Child(["sh", "-c", command, sys.executable], os.environ | {{"RANK": {_RANK!r}}}, folder, 600)
print(child.wait(lambda: False), child.was_told)
"""
    assert run_script(script) == (0, "rank\ncommand\n7 True\n")


@pytest.mark.parametrize("may_leave", [True, False])
def test_a_command_is_told_and_may_be_left_shortly_before_the_kill(may_leave: bool) -> None:
    """A rank that doesn't end keeps SIGTERM from the command until then."""
    script = f"""
command = "trap 'sleep 0.5; exit 7' TERM; kill -TERM $PPID; while :; do sleep 0.05; done"
os.environ["STEPKEEPER_LAUNCHER"] = str(folder)
sign_on()
kill, os.kill = os.kill, lambda pid, signum: pid == os.getpid() or kill(pid, signum)
child = Child(["sh", "-c", command], os.environ, folder, 0.5)
print(child.wait(lambda: {may_leave}))
"""
    assert run_script(script) == (0, "137\n" if may_leave else "7\n")


def test_a_rank_that_cant_be_told_keeps_no_signal_from_the_command() -> None:
    script = """
command = "trap 'exit 7' TERM; kill -TERM $PPID; while :; do sleep 0.05; done"
os.environ["STEPKEEPER_LAUNCHER"] = str(folder)
sign_on()

def kill(pid, signum, kill=os.kill):
    if pid == os.getpid():
        raise PermissionError
    kill(pid, signum)

os.kill = kill
print(Child(["sh", "-c", command], os.environ, folder, 600).wait(lambda: False))
"""
    assert run_script(script) == (0, "7\n")


def test_a_command_runs_where_no_folder_can_be_made() -> None:
    script = """
import stepkeeper.launch.__main__ as launch

def refuse(**_):
    raise FileNotFoundError("No usable temporary directory found")

launch.TemporaryDirectory = refuse
command = "trap 'exit ${STEPKEEPER_LAUNCHER:-5}' TERM; kill -TERM $PPID; while :; do sleep 0.05; done"
sys.exit(launch.main(["sh", "-c", command]))
"""
    assert run_script(script) == (5, "")


def test_only_the_processes_that_have_signed_on_and_still_run_are_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPKEEPER_LAUNCHER", str(tmp_path))
    subprocess.run(
        [sys.executable, "-c", f"from {launcher_folder.__name__} import sign_on; sign_on()"], check=True
    )
    (ended,) = tmp_path.iterdir()
    _, started, namespace = ended.name.split("-")
    # The numbers of ended processes, and of those of another PID namespace, are those of this one and its parent.
    (tmp_path / f"{os.getpid()}-{started}-{namespace}").touch()
    parent = KernelRecord(os.getppid()).started
    (tmp_path / f"{os.getppid()}-{parent}-{int(namespace) + 1}").touch()
    (tmp_path / "error.json").touch()
    assert list_ranks(tmp_path) == frozenset()
    launcher_folder.sign_on()
    assert list_ranks(tmp_path) == {os.getpid()}
    launcher_folder.sign_off()
    assert list_ranks(tmp_path) == frozenset()
    assert list_ranks(tmp_path / "gone") == frozenset()


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
