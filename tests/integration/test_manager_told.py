"""Trainers that are told to stop while something else is wrong, as processes of their own."""

import json
from pathlib import Path

import pytest
from fork_server import ForkServer

from stepkeeper.contract import ExitCode, Termination
from stepkeeper.log import Log
from stepkeeper.storage import open_store

TRAINER = Path(__file__).parent / "manager_trainer" / "told.py"


@pytest.mark.parametrize(
    ("case", "code", "step"),
    [
        ("chosen_end", ExitCode.SAVED, 2),
        ("left_between", ExitCode.SAVED, 2),
        ("left_within", ExitCode.SAVED, 1),
        ("own_break", ExitCode.SAVED, 2),
        ("failed_before", ExitCode.SAVED, 3),
        ("stuck", ExitCode.SAVED, 1),
        ("stuck_save", ExitCode.SAVED, 1),
    ],
)
def test_what_a_trainer_that_is_told_leaves_behind(
    torch_server: ForkServer, tmp_path: Path, case: str, code: ExitCode, step: int
) -> None:
    process = torch_server.run([TRAINER, tmp_path, case], timeout=60)
    assert process.returncode == code, process.stderr
    head = Log(open_store((tmp_path / "root").as_uri())).open().latest
    assert head is not None
    assert head.step == step
    assert Termination.from_json((tmp_path / "termination").read_bytes()).code == code
    said = [json.loads(line) for line in process.stdout.splitlines()]
    # The grace period is 4 s; what comes after it is a SIGKILL. Python's own end takes some of it.
    assert [each["event"] for each in said] == ["left"]
    assert all(each["after_s"] < 3.7 for each in said)
