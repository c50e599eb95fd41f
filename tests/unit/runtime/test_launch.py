"""What the launcher of a pod tells torchrun, which exit code it ends with, and who has started a process."""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from stepkeeper.contract import Termination
from stepkeeper.distributed.devices import choose_backend
from stepkeeper.distributed.launchers import Launcher, choose_launcher
from stepkeeper.ending import launcher_folder
from stepkeeper.ending.launcher_folder import list_registered
from stepkeeper.errors import ProcessGroupError
from stepkeeper.kernel_record import KernelRecord
from stepkeeper.launch.__main__ import torchrun_variables
from stepkeeper.launch.exit_code import choose_exit_code, read_torchrun_error
from stepkeeper_testing.pod import pod_environ, pod_identity

POD = pod_environ(
    pod_identity(slice_index=1, host_index=1, n_slices=2, hosts_per_slice=2, coordinator="lm-w-0-0.lm")
)


def ended(code: int, notice: str | None = None, *, agreed: bool = False) -> Termination:
    return Termination(code=code, notice=notice, agreed_step=7 if agreed else None)


BOTH = (True, False)


@pytest.mark.parametrize(
    ("code", "last_word", "was_asked_to_stop", "meant"),
    [
        *((1, ended(each), BOTH, each) for each in (75, 77, 78, 3)),
        (137, ended(75), BOTH, 75),
        (1, None, BOTH, 1),
        (0, None, BOTH, 0),
        pytest.param(0, ended(1), BOTH, 0, id="the launcher has started processes that came to the end"),
        pytest.param(1, ended(75, "sigterm"), [True], 75, id="SIGTERM for all"),
        pytest.param(1, ended(75, "sigterm"), [False], 1, id="SIGTERM of the launcher: another one failed"),
        pytest.param(137, ended(75, "sigterm"), [False], 137, id="the same, and the launcher was killed"),
        pytest.param(1, ended(75, "directive"), [False], 75, id="the operator said it"),
        pytest.param(1, ended(75, "peer"), [False], 75, id="a peer said it"),
        pytest.param(1, ended(75, "sigterm", agreed=True), [False], 75, id="all have stopped together"),
        pytest.param(0, ended(75, "sigterm", agreed=True), [False], 0, id="the same, and all is well"),
        pytest.param(1, ended(0), [True], 0, id="torchrun got SIGTERM before it has seen the end"),
        pytest.param(1, ended(0), [False], 1, id="the launcher failed after the training"),
    ],
)
def test_the_training_has_the_last_word_where_its_launcher_fails(
    code: int, last_word: Termination | None, was_asked_to_stop: Collection[bool], meant: int
) -> None:
    for each in was_asked_to_stop:
        assert choose_exit_code(code, last_word, was_asked_to_stop=each) == meant


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
from stepkeeper.ending.launcher_folder import register

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


_RANK = """
import os, signal, sys
from stepkeeper.ending.launcher_folder import register
signal.signal(signal.SIGTERM, lambda *_: (print("rank", flush=True), sys.exit(75)))
register()
os.kill(int(sys.argv[1]), signal.SIGTERM)
while True:
    signal.pause()
"""


def test_sigterm_goes_to_the_ranks_and_to_the_command_once_they_have_ended() -> None:
    script = f"""
command = "trap 'echo command; exit 7' TERM; $0 -c \\"$RANK\\" $PPID; while :; do sleep 0.05; done"
child = Child(["sh", "-c", command, sys.executable], os.environ | {{"RANK": {_RANK!r}}}, folder, 600)
print(child.wait(lambda: False), child.was_asked_to_stop)
"""
    assert run_script(script) == (0, "rank\ncommand\n7 True\n")


_TRAPS = "trap 'sleep 0.5; exit 7' TERM; trap 'exit 8' USR1; kill -{name} $PPID; while :; do sleep 0.05; done"
_A_RANK = """
os.environ["STEPKEEPER_LAUNCHER"] = str(folder)
register()
"""
_THAT_GOES_ON = "kill, os.kill = os.kill, lambda pid, signum: pid == os.getpid() or kill(pid, signum)\n"
_NOT_OURS = """
def refuse(pid, signum, kill=os.kill):
    if pid == os.getpid():
        raise PermissionError
    kill(pid, signum)

os.kill = refuse
"""


@pytest.mark.parametrize(
    ("ranks", "signal", "grace_s", "may_leave", "ends"),
    [
        pytest.param("", "TERM", 600, False, "7 True", id="a command without ranks is told"),
        pytest.param("", "USR1", 600, False, "8 False", id="another signal is handed on"),
        pytest.param(
            _A_RANK + _THAT_GOES_ON, "TERM", 0.5, False, "7 True", id="told shortly before the kill"
        ),
        pytest.param(_A_RANK + _THAT_GOES_ON, "TERM", 0.5, True, "137 True", id="and left then"),
        pytest.param(_A_RANK + _NOT_OURS, "TERM", 600, False, "7 True", id="a rank that can't be told"),
    ],
)
def test_a_command_ends_by_the_signal(
    ranks: str, signal: str, grace_s: float, may_leave: bool, ends: str
) -> None:
    script = f"""{ranks}
child = Child(["sh", "-c", {_TRAPS.format(name=signal)!r}], os.environ, folder, {grace_s})
print(child.wait(lambda: {may_leave}), child.was_asked_to_stop)
"""
    assert run_script(script) == (0, f"{ends}\n")


@pytest.mark.parametrize(
    ("trap", "grace_s", "ends"),
    [
        pytest.param("exit 7", 600, "7 True", id="it is told"),
        pytest.param("", 0.5, "137 True", id="it is killed when its time is over: nobody else would"),
    ],
)
def test_the_end_of_the_supervisor_ends_the_command(trap: str, grace_s: float, ends: str) -> None:
    script = f"""
parent, began = os.getppid(), folder / "began"
os.getppid = lambda: 1 if began.exists() else parent
command = f"trap {trap!r} TERM; touch {{began}}; while :; do sleep 0.05; done"
child = Child(["sh", "-c", command], os.environ, folder, {grace_s}, parent)
print(child.wait(lambda: False), child.was_asked_to_stop)
"""
    assert run_script(script) == (0, f"{ends}\n")


def test_without_the_end_of_the_supervisor_the_command_ends_by_itself() -> None:
    script = """
child = Child(["sh", "-c", "sleep 0.2; exit 3"], os.environ, folder, 600, os.getppid())
print(child.wait(lambda: False), child.was_asked_to_stop)
"""
    assert run_script(script) == (0, "3 False\n")


def test_only_the_processes_that_have_signed_on_and_still_run_are_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPKEEPER_LAUNCHER", str(tmp_path))
    subprocess.run(
        [sys.executable, "-c", f"from {launcher_folder.__name__} import register; register()"], check=True
    )
    (ended,) = tmp_path.iterdir()
    _, started, namespace = ended.name.split("-")
    # The numbers of ended processes, and of those of another PID namespace, are those of this one and its parent.
    (tmp_path / f"{os.getpid()}-{started}-{namespace}").touch()
    parent = KernelRecord(os.getppid()).started
    (tmp_path / f"{os.getppid()}-{parent}-{int(namespace) + 1}").touch()
    (tmp_path / "error.json").touch()
    assert list_registered(tmp_path) == frozenset()
    launcher_folder.register()
    assert list_registered(tmp_path) == {os.getpid()}
    assert list_registered(tmp_path / "gone") == frozenset()


def test_torchrun_is_told_the_hosts_over_all_slices_unless_the_template_says_it() -> None:
    hosts = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "lm-w-0-0.lm"}
    assert torchrun_variables(POD) == hosts | {"PET_MASTER_PORT": "29500"}
    assert torchrun_variables(POD | {"PET_MASTER_PORT": "1234"}) == hosts


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "lm-w-0-0.lm",
    "MASTER_PORT": "29500",
}
FIRST_POD = pod_environ(pod_identity())


@pytest.mark.parametrize(
    ("environ", "on_tpu", "launcher"),
    [
        ({}, False, Launcher.NONE),
        (FIRST_POD, False, Launcher.OPERATOR),
        (TORCHRUN, False, Launcher.TORCHRUN),
        (FIRST_POD | TORCHRUN, False, Launcher.TORCHRUN),
        (FIRST_POD | TORCHRUN, True, Launcher.TPU),
        ({}, True, Launcher.TPU),
        (FIRST_POD | {"MASTER_ADDR": "of the template", "MASTER_PORT": "1"}, False, Launcher.OPERATOR),
    ],
)
def test_the_launcher_nearest_to_the_process_counts(
    environ: dict[str, str], on_tpu: bool, launcher: Launcher
) -> None:
    assert choose_launcher(environ, on_tpu=on_tpu) is launcher


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_a_variable_that_a_launcher_left_out_is_named(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ProcessGroupError, match=f"but {missing} is not. Set all of"):
        choose_launcher(environ, on_tpu=False)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), ("mtia", "gloo")],
)
def test_the_backend_is_the_devices_own_beside_gloo(kind: str, backend: str) -> None:
    assert choose_backend(torch.device(kind)) == backend
