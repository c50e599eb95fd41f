"""Trainers of one process that are told to stop, or fenced, as processes: what they save, and how they end."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fork_server import ForkServer
from rank_talk import ended_at_last, hear, hear_rest

from stepkeeper.contract import ExitCode
from stepkeeper_testing.left_behind import head_of, last_word

TRAINER = Path(__file__).parent / "manager_trainer" / "alone.py"


@pytest.mark.parametrize(
    ("case", "step"),
    [("own_handler_in_a_save", 2), ("own_handler_in_a_step", 1), ("stuck", 1), ("long_end", 2)],
)
def test_what_a_trainer_that_is_told_leaves_behind(
    torch_server: ForkServer, tmp_path: Path, case: str, step: int
) -> None:
    process = torch_server.run([TRAINER, tmp_path, case], timeout=200)
    ended_s = time.monotonic()
    assert process.returncode == last_word(tmp_path).code == ExitCode.SAVED, process.stderr
    assert head_of(tmp_path).step == step
    (said,) = [json.loads(line) for line in process.stdout.splitlines()]
    # The grace period is 4 s; what comes after it is a SIGKILL. Python's own end takes some of it.
    assert said["after_s"] < 3.7
    if case == "long_end":
        # The interpreter's own end would take 20 s.
        assert ended_s - said["told_s"] < 8.0


@pytest.mark.parametrize(
    "case",
    [
        "lightning",
        "lightning+first",
        "transformers",
        "loader-spawn",
    ],
)
def test_other_code_that_minds_sigterm_is_no_obstacle_and_no_worker_is_left(
    torch_server: ForkServer, tmp_path: Path, case: str
) -> None:
    with (tmp_path / "log").open("w") as log:
        process = torch_server.start([TRAINER, tmp_path, case], stdout=subprocess.PIPE, stderr=log)
    with ended_at_last([process]):
        workers = hear(process, "workers")["pids"] if case.startswith("loader") else []
        hear(process, "trains")
        # What takes SIGTERM in C is noticed within a second.
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        said = hear_rest(process)
    assert process.returncode == ExitCode.SAVED, (tmp_path / "log").read_text()
    assert [each["step"] for each in said if each["event"] == "stops"] == [head_of(tmp_path).step]
    assert (last_word(tmp_path).code, last_word(tmp_path).notice) == (ExitCode.SAVED, "sigterm")
    ends_s = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < ends_s, "a worker is left"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "way",
    ["save", "close", "restore", "fail_later", "forgive", "choose_an_end", "ask_nothing", "drop"],
)
def test_a_pod_ends_as_fenced_and_names_who_won(torch_server: ForkServer, tmp_path: Path, way: str) -> None:
    done = torch_server.run([TRAINER, tmp_path, f"fenced-{way}"], timeout=200)
    assert done.returncode == ExitCode.FENCED, done.stderr
    assert "start [0, 3] of " in done.stderr
    if way != "drop":
        assert "on host node-7" in done.stderr
        assert last_word(tmp_path).code == ExitCode.FENCED
        assert "start [0, 3] of " in (last_word(tmp_path).error or "")


@pytest.mark.parametrize(
    ("way", "ends"),
    [
        pytest.param("restore", ExitCode.FENCED, id="which an exception ends"),
        pytest.param("fail_later", ExitCode.FENCED, id="which another exception ends later"),
        pytest.param("forgive", ExitCode.DONE, id="which goes on without its root"),
    ],
)
def test_a_process_by_hand_ends_as_fenced_where_an_exception_ends_it(
    torch_server: ForkServer, tmp_path: Path, way: str, ends: ExitCode
) -> None:
    done = torch_server.run([TRAINER, tmp_path, f"fenced-{way}-by_hand"], timeout=200)
    assert done.returncode == ends, done.stderr
    assert ("on host node-7" in done.stderr) or ends == ExitCode.DONE
    assert ("ValueError: the loss is no number" in done.stderr) == (way == "fail_later")
