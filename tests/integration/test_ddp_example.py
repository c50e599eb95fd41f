"""The DDP example on 1, then 4, then 2 processes: one training, and one model's worth of bytes, spread over all."""

import math
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_server import ForkServer
from free_ports import free_port

# Up to four trainings one after the other, of up to four processes that import torch.
pytestmark = pytest.mark.timeout(900)

TRAIN = Path(__file__).parents[2] / "examples" / "ddp" / "train.py"
N_PARAMETERS = 64 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
STATE_BYTES = 3 * 4 * N_PARAMETERS
"""Parameters and AdamW's two moments; its step counts are six numbers."""

FRAME_BYTES = 2_000
_STEP = re.compile(r"step=(\d+) loss=(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    started_from: int
    losses: dict[int, float]


Train = Callable[[Path, int, int], Run]
"""train(root, n_processes, n_steps): what rank 0 has printed."""


def read_run(output: str, n_processes: int) -> Run:
    start = re.search(rf"start step=(\d+) processes={n_processes}\n", output)
    assert start is not None
    losses = {int(step): float(loss) for step, loss in _STEP.findall(output)}
    return Run(started_from=int(start[1]), losses=losses)


@pytest.fixture
def train(torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path) -> Train:
    """Start the processes as torchrun would, with the same variables. With it: test_pages.py."""

    def train(root: Path, n_processes: int, n_steps: int) -> Run:
        port = free_port()
        command = [TRAIN, "--checkpoint-uri", root.as_uri(), "--steps", n_steps]
        outputs = [tmp_path / f"{rank}-of-{n_processes}.txt" for rank in range(n_processes)]
        processes = []
        try:
            for rank, output in enumerate(outputs):
                env = os.environ | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(n_processes),
                    "LOCAL_WORLD_SIZE": str(n_processes),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                with output.open("w") as stream:
                    server = torch_servers[rank % 2]
                    processes.append(server.start(command, env=env, stdout=stream, stderr=subprocess.STDOUT))
            codes = [process.wait(200) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert codes == [0] * n_processes, "\n".join(output.read_text()[-3000:] for output in outputs)
        return read_run(outputs[0].read_text(), n_processes)

    return train


def sizes_of(root: Path, step: int) -> list[int]:
    return [path.stat().st_size for path in root.glob(f"{step}/*/*.distcp")]


@pytest.mark.smoke
def test_one_training_goes_on_with_1_then_4_then_2_processes(train: Train, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 1, 30)
    root = tmp_path / "changing"
    runs = [train(root, 1, 10), train(root, 4, 20), train(root, 2, 30)]

    assert [run.started_from for run in runs] == [0, 10, 20]
    losses = {step: loss for run in runs for step, loss in run.losses.items()}
    assert sorted(losses) == sorted(whole.losses) == list(range(1, 31))
    for step, loss in whole.losses.items():
        # As if by one process, up to the order in which gradients are added.
        assert math.isclose(losses[step], loss, rel_tol=1e-3), (
            f"step {step}: {losses[step]} instead of {loss}"
        )

    for step, n_processes in ((10, 1), (20, 4), (30, 2)):
        sizes = sizes_of(root, step)
        assert len(sizes) == n_processes
        assert STATE_BYTES <= sum(sizes) < STATE_BYTES + FRAME_BYTES * (24 + 4 * n_processes)
        assert max(sizes) <= 1.05 * sum(sizes) / n_processes
