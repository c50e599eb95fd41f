"""A trainer without a manager's block whose root was claimed by another: it ends with 77 all the same."""

import os
import subprocess
from pathlib import Path

import pytest
from fork_server import ForkServer

from stepkeeper.contract import ExitCode, Interval, Settings, Termination
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.pod import pod_environ, pod_identity

TRAINER = Path(__file__).parent / "manager_trainer" / "fenced.py"
RAISING = ("save", "result", "wait", "join", "close", "restore_latest", "restore", "fail_later")
"""Ways to lose the root in which an exception ends the process."""

ENDING = ("forgive", "forgive_and_close", "choose_an_end", "ask_nothing")
"""Ways in which the process ends by itself."""


def run(server: ForkServer, tmp_path: Path, pod: Path | None, way: str) -> tuple[int, str]:
    """Let a trainer lose its root. Return its exit code, and what it has written."""
    uri, env = (tmp_path / "root").as_uri(), dict(os.environ)
    if pod is not None:
        pod.mkdir()
        (pod / "settings.json").write_bytes(Settings(uri=uri, interval=Interval(steps=1)).to_json())
        env |= pod_environ(pod_identity())
    command = [TRAINER, uri, "-" if pod is None else pod, way]
    process = server.start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = process.communicate(timeout=200)[0]
    return process.wait(), said


@pytest.mark.parametrize("way", [*RAISING, *ENDING])
def test_a_pod_ends_as_fenced_and_names_who_won(torch_server: ForkServer, tmp_path: Path, way: str) -> None:
    code, said = run(torch_server, tmp_path, tmp_path / "pod", way)
    assert code == ExitCode.FENCED, said
    assert "start [0, 3] of " in said
    assert "on host node-7" in said
    told = Termination.from_json((tmp_path / "pod" / "termination").read_bytes())
    assert told.code == ExitCode.FENCED
    assert told.error is not None
    assert "start [0, 3] of " in told.error


def test_a_pod_that_drops_its_manager_in_a_save_ends_as_fenced(
    torch_server: ForkServer, tmp_path: Path
) -> None:
    code, said = run(torch_server, tmp_path, tmp_path / "pod", "drop")
    assert code == ExitCode.FENCED, said
    assert "start [0, 3] of " in said


@pytest.mark.parametrize("way", RAISING)
def test_a_process_by_hand_that_an_exception_ends_ends_as_fenced(
    torch_server: ForkServer, tmp_path: Path, way: str
) -> None:
    code, said = run(torch_server, tmp_path, None, way)
    assert code == ExitCode.FENCED, said
    assert "on host node-7" in said
    assert ("ValueError: the loss is no number" in said) == (way == "fail_later")


def test_a_process_by_hand_may_go_on_without_its_root(torch_server: ForkServer, tmp_path: Path) -> None:
    code, said = run(torch_server, tmp_path, None, "forgive")
    assert code == ExitCode.DONE, said


@pytest.mark.parametrize(("way", "code"), [("done", ExitCode.DONE), ("told", ExitCode.SAVED)])
def test_a_pod_that_another_jobs_root_did_not_let_in_ends_as_its_own_training_does(
    torch_server: ForkServer, tmp_path: Path, way: str, code: ExitCode
) -> None:
    other = (tmp_path / "other").as_uri()
    Log(open_store(other)).begin(pod_identity(job="pretrain", job_uid="uid-7"), host="node-7")
    env, uri = dict(os.environ) | pod_environ(pod_identity()), (tmp_path / "root").as_uri()
    (tmp_path / "settings.json").write_bytes(Settings(uri=uri, interval=Interval(steps=1)).to_json())
    script = TRAINER.with_name("warm_start.py")
    command = [script, tmp_path, other, way]
    process = torch_server.start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = process.communicate(timeout=200)[0]
    assert process.wait() == code, said
    assert Termination.from_json((tmp_path / "termination").read_bytes()).code == code
