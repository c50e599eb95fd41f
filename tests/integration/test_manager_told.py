"""Trainers that are told to stop while something else is wrong, as processes of their own."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from fork_server import ForkServer

from stepkeeper.contract import ExitCode, Termination
from stepkeeper.log import Log
from stepkeeper.storage import open_store

TRAINER = Path(__file__).parent / "manager_trainer" / "told.py"


def run(server: ForkServer, folder: Path, case: str) -> subprocess.CompletedProcess[str]:
    """Run the trainer, which has ended with one code in the termination message and for its parent."""
    process = server.run([TRAINER, folder, case], timeout=200)
    word = Termination.from_json((folder / "termination").read_bytes())
    assert word.code == process.returncode, process.stderr
    return process


@pytest.mark.parametrize(
    ("case", "code", "step"),
    [
        ("chosen_end", ExitCode.SAVED, 2),
        ("left_between", ExitCode.SAVED, 2),
        ("left_within", ExitCode.SAVED, 1),
        ("failed_before", ExitCode.SAVED, 3),
        ("stuck", ExitCode.SAVED, 1),
    ],
)
def test_what_a_trainer_that_is_told_leaves_behind(
    torch_server: ForkServer, tmp_path: Path, case: str, code: ExitCode, step: int
) -> None:
    process = run(torch_server, tmp_path, case)
    assert process.returncode == code, process.stderr
    head = Log(open_store((tmp_path / "root").as_uri())).open().latest
    assert head is not None
    assert head.step == step
    said = [json.loads(line) for line in process.stdout.splitlines()]
    # The grace period is 4 s; what comes after it is a SIGKILL. Python's own end takes some of it.
    assert [each["event"] for each in said] == ["left"]
    assert all(each["after_s"] < 3.7 for each in said)


def test_an_interpreter_that_takes_long_to_end_is_out_before_the_kill(
    torch_server: ForkServer, tmp_path: Path
) -> None:
    process = run(torch_server, tmp_path, "long_end")
    ended_s = time.monotonic()
    assert process.returncode == ExitCode.SAVED, process.stderr
    (said,) = [json.loads(line) for line in process.stdout.splitlines()]
    # The manager is done long before the grace period of 4 s is over. The interpreter's own end would take 20 s.
    assert ended_s - said["told_s"] < 8.0


@pytest.mark.parametrize(
    ("case", "adds", "told"),
    [
        ("time_for_one", False, ": only the one in flight is finished"),
        ("time_for_both", True, ": both are made"),
    ],
)
def test_what_is_decided_of_the_save_at_a_stop_is_told_with_its_reason(
    torch_server: ForkServer, tmp_path: Path, case: str, adds: bool, told: str
) -> None:
    process = run(torch_server, tmp_path, case)
    assert process.returncode == ExitCode.SAVED, process.stderr
    word = Termination.from_json((tmp_path / "termination").read_bytes())
    assert word.decision is not None
    assert word.decision.endswith(told)
    assert " s are left, the save in flight needs about " in word.decision
    assert f"stopping {word.decision}" in process.stderr
    # What is told is what was done.
    assert word.decision.startswith(f"at step {word.step}, ")
    assert word.committed is not None
    assert word.committed.step == (word.step if adds else 2)
