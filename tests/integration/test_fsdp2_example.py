"""The FSDP2 example: told to stop on 2 processes, it resumes to the bit, and goes on with 1."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fork_server import ForkedProcess, ForkServer
from free_ports import free_port

# Four trainings one after the other.
pytestmark = pytest.mark.timeout(900)

TRAIN = Path(__file__).parents[2] / "examples" / "fsdp2" / "train.py"
PATIENCE_S = 200
N_STEPS = 40
SLOW_S = 1.0
"""After each step of a training that is to be told in time, also by a process that has no processor for a while."""

READ_LOSSES = """
import json
import sys
from pathlib import Path

from stepkeeper import CheckpointManager, Whole

losses = []
manager = CheckpointManager(sys.argv[1], chkpt_on_preemption=False)
manager.restore(int(sys.argv[2]), {"losses": Whole(losses)}, items=["losses"])
Path(sys.argv[3]).write_text(json.dumps(losses), encoding="utf-8")
"""

Servers = tuple[ForkServer, ForkServer]


@contextmanager
def training(
    servers: Servers, output: Path, root: Path, n: int, n_steps: int, pause_s: float = 0.02
) -> Iterator[list[ForkedProcess]]:
    """Its processes, with torchrun's variables; rank 0 prints into `output`."""
    port = free_port()
    command = [TRAIN, "--checkpoint-uri", root.as_uri(), "--steps", n_steps, "--pause-seconds", pause_s]
    processes = []
    try:
        for rank in range(n):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with output.with_suffix(f".{rank}").open("w") as stream:
                processes.append(
                    servers[rank].start(
                        command, env={**os.environ, **env}, stdout=stream, stderr=subprocess.STDOUT
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()


def said(output: Path) -> str:
    return output.with_suffix(".0").read_text()


def train(servers: Servers, output: Path, root: Path, n: int, n_steps: int) -> str:
    with training(servers, output, root, n, n_steps) as processes:
        codes = [process.wait(PATIENCE_S) for process in processes]
    assert codes == [0] * n, said(output)
    return said(output)


def losses_of(servers: Servers, folder: Path, root: Path) -> list[float]:
    script, found = folder / "read.py", folder / "losses.json"
    script.write_text(READ_LOSSES, encoding="utf-8")
    assert servers[0].run([script, root.as_uri(), N_STEPS, found], timeout=PATIENCE_S).returncode == 0
    losses: list[float] = json.loads(found.read_text())
    return losses


def test_a_training_that_was_told_to_stop_resumes_to_the_bit_and_goes_on_with_another_number(
    torch_servers: Servers, tmp_path: Path
) -> None:
    whole, root = tmp_path / "whole", tmp_path / "root"
    train(torch_servers, tmp_path / "whole-run", whole, 2, N_STEPS)

    stopped = tmp_path / "stopped"
    with training(torch_servers, stopped, root, 2, N_STEPS, SLOW_S) as processes:
        deadline = time.monotonic() + PATIENCE_S
        while "step=5 " not in said(stopped):
            assert processes[0].poll() is None, said(stopped)
            assert time.monotonic() < deadline, said(stopped)
            time.sleep(0.02)
        processes[1].send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE_S) for process in processes] == [75, 75], said(stopped)
    last = max(int(step) for step in re.findall(r"^step=(\d+) ", said(stopped), re.MULTILINE))

    assert 5 <= last < N_STEPS
    assert f"start step={last} processes=2\n" in train(torch_servers, tmp_path / "again", root, 2, N_STEPS)
    losses = losses_of(torch_servers, tmp_path, root)
    assert len(losses) == N_STEPS
    assert losses == losses_of(torch_servers, tmp_path, whole)
    more = train(torch_servers, tmp_path / "alone", root, 1, N_STEPS + 2)
    assert f"start step={N_STEPS} processes=1\n" in more
