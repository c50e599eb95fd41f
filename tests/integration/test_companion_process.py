"""Companions as processes: which signals end them, when they are gone, and trainings that fork workers at any time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer

from stepkeeper import CheckpointManager, Options
from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import ClaimRequest, Kind, OpenRequest
from stepkeeper.contract.wire import encode

SCRIPTS = Path(__file__).parent / "companion_process"
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def gone(pid: int, timeout_s: float) -> bool:
    """A zombie, which nobody in this container may reap, is as gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("number", STOPS)
def test_a_companion_that_is_told_to_stop_while_it_starts_answers_all_the_same(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = CompanionProcess(lambda _: None)
    os.kill(process.pid, number)
    opening = OpenRequest(rank=0, world_size=1, uri=(tmp_path / "root").as_uri())
    process.send_request(Kind.OPEN, encode(opening), timeout_s=60)
    assert process.send_request(Kind.CLAIM, encode(ClaimRequest()), timeout_s=60)["claim"]["slot"] == 0
    process.close()


@pytest.mark.parametrize("number", STOPS)
def test_a_save_is_committed_by_the_companion_that_is_told_to_stop_meanwhile(
    tmp_path: Path, number: signal.Signals
) -> None:
    with CheckpointManager((tmp_path / "root").as_uri(), options=Options(stop_on_notice=False)) as manager:
        manager.save(1, {"w": torch.zeros(3)}).result()
        pid = manager.health().companion_pid
        assert pid is not None
        # It has been asked to write, and is told, before it can go on.
        os.kill(pid, signal.SIGSTOP)
        manager.save(2, {"w": torch.ones(3)})
        os.kill(pid, number)
        in_flight = manager.in_flight
        assert in_flight is not None
        os.kill(pid, signal.SIGCONT)
        assert in_flight.result(60).step == 2
        assert manager.health().companion_pid == pid
        assert manager.steps() == [1, 2]


def test_a_companion_is_gone_with_its_trainer_though_a_forked_child_has_its_socket() -> None:
    with subprocess.Popen(
        [sys.executable, str(SCRIPTS / "forked.py")], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        said = json.loads(trainer.stdout.readline())
        try:
            assert not gone(said["companion"], 0.3)
            trainer.kill()
            trainer.wait()
            assert gone(said["companion"], 60)
            assert not gone(said["child"], 0.1), "it still has the socket"
        finally:
            trainer.kill()
            os.kill(said["child"], signal.SIGKILL)


@pytest.mark.parametrize("how", ["hooked", "unhooked"])
def test_a_worker_that_is_forked_as_the_companion_starts_inherits_nothing_and_hides_no_end(
    torch_server: ForkServer, tmp_path: Path, how: str
) -> None:
    root = (tmp_path / "root").as_uri()
    done = torch_server.run([SCRIPTS / "forking.py", root, how], timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
