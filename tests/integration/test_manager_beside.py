"""Trainings whose other code minds SIGTERM too: they save one step, end with 75, and leave no worker behind."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from fork_server import ForkServer
from rank_talk import ended_at_last, hear, hear_rest

from stepkeeper.contract import ExitCode, Termination
from stepkeeper.log import Log
from stepkeeper.storage import open_store

TRAINER = Path(__file__).parent / "manager_trainer" / "beside.py"
PATIENCE_S = 60.0


def check_told(server: ForkServer, folder: Path, case: str) -> None:
    """Tell such a training to stop, and check how it ends."""
    with (folder / "log").open("w") as log:
        process = server.start([TRAINER, folder, case], stdout=subprocess.PIPE, stderr=log)
    with ended_at_last([process]):
        workers = hear(process, "workers")["pids"] if case.startswith("loader") else []
        hear(process, "trains")
        if "between" not in case:
            # What takes SIGTERM in C is noticed within a second.
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
        said = hear_rest(process)
    text = (folder / "log").read_text()
    assert process.returncode == ExitCode.SAVED, text
    (stop,) = (each["step"] for each in said if each["event"] == "stops")
    head = Log(open_store((folder / "root").as_uri())).open().latest
    assert head is not None
    assert head.step == stop
    end = Termination.from_json((folder / "termination").read_bytes())
    assert (end.code, end.notice) == (ExitCode.SAVED, "sigterm")
    ends_s = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < ends_s, "a worker is left"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "case",
    ["lightning", "lightning+first", "transformers", "transformers+first"],
)
def test_other_handlers_are_no_obstacle(torch_server: ForkServer, tmp_path: Path, case: str) -> None:
    check_told(torch_server, tmp_path, case)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_data_loader_are_gone(torch_server: ForkServer, tmp_path: Path, method: str) -> None:
    check_told(torch_server, tmp_path, f"loader-{method}")
