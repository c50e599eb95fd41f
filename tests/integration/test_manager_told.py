"""Trainers of one process that are told to stop, or fenced, as processes: what they save, and how they end."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from rank_talk import ended_at_last, hear, hear_rest

from stepkeeper import CheckpointManager, Options
from stepkeeper.contract import ExitCode
from stepkeeper.errors import OtherJobsRootError
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.left_behind import head_of, last_word
from stepkeeper_testing.pod import pod_identity

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
        "transformers+first",
        "loader-fork",
        "loader-spawn",
        "loader-forkserver",
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


def run(server: ForkServer, folder: Path, case: str) -> tuple[int, str]:
    """Return the exit code of such a trainer, and what it has written."""
    process = server.start([TRAINER, folder, case], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = process.communicate(timeout=200)[0]
    return process.wait(), said


@pytest.mark.parametrize(
    "way",
    ["save", "close", "restore", "fail_later", "forgive", "choose_an_end", "ask_nothing", "drop"],
)
def test_a_pod_ends_as_fenced_and_names_who_won(torch_server: ForkServer, tmp_path: Path, way: str) -> None:
    code, said = run(torch_server, tmp_path, f"fenced-{way}")
    assert code == ExitCode.FENCED, said
    assert "start [0, 3] of " in said
    if way != "drop":
        assert "on host node-7" in said
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
    code, said = run(torch_server, tmp_path, f"fenced-{way}-by_hand")
    assert code == ends, said
    assert ("on host node-7" in said) or ends == ExitCode.DONE
    assert ("ValueError: the loss is no number" in said) == (way == "fail_later")


def test_a_pod_that_another_jobs_root_did_not_let_in_ends_as_its_own_training_does(
    torch_server: ForkServer, tmp_path: Path
) -> None:
    code, said = run(torch_server, tmp_path, "elsewhere")
    assert code == last_word(tmp_path).code == ExitCode.SAVED, said


def test_who_waited_until_the_root_was_freed_ends_as_ever(tmp_path: Path) -> None:
    uri, state = (tmp_path / "root").as_uri(), {"w": torch.zeros(4)}
    Log(open_store(uri)).begin(pod_identity(restart_attempt=3), host="node-7")
    with CheckpointManager(uri, save=1, options=Options(stop_on_notice=False)) as manager:
        for _ in range(2):
            with pytest.raises(OtherJobsRootError):
                manager.restore(state)
        Log(open_store(uri)).begin(take_over=True)
        manager.save(1, state).result()
