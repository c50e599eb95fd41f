"""One process of a training under torchrun, as in a pod: python worker.py FOLDER CASE."""

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import stepkeeper
from stepkeeper import CheckpointManager
from stepkeeper_testing.trainer import places_in, slow_shares

FOLDER = Path(sys.argv[1])
CASE = sys.argv[2]


def load() -> Iterator[object]:
    """Load data by workers as long as the rank trains."""
    data: Any = list(range(64))
    method = CASE.partition("-")[2]
    loader = DataLoader(data, num_workers=2, persistent_workers=True, multiprocessing_context=method)
    while True:
        yield from loader


def crash_beside(rank: int) -> None:
    """Rank 1 crashes once both train, and rank 0 trains on."""
    (FOLDER / f"trains-{rank}").touch()
    if rank == 1 and (FOLDER / "trains-0").exists():
        ctypes.string_at(0)


def tell_when_it_joins(rank: int) -> None:
    """Have this process leave a sign when it has found the store and begins to form the group."""
    form = dist.init_process_group

    def tell_and_form(*args: Any, **options: Any) -> None:
        (FOLDER / f"joins-{rank}").touch()
        form(*args, **options)

    dist.init_process_group = tell_and_form


def write_slowly(write: Any, *args: Any, **options: Any) -> Any:
    """Have this rank's part of each save take a while: the others are done with theirs long before."""
    time.sleep(3.0)
    return write(*args, **options)


def main() -> None:
    if CASE == "never-joins":
        rank = int(os.environ["RANK"])
        if rank < 2:
            (FOLDER / f"runs-{rank}").touch()
            torchrun = os.getppid()
            while os.getppid() == torchrun:
                time.sleep(0.5)
            return
        tell_when_it_joins(rank)
    this = stepkeeper.distributed.init(timeout_s=120)
    state = {"w": torch.zeros(4)}
    with CheckpointManager.from_env(_places=places_in(FOLDER)) as manager:
        manager.restore(state)
        if CASE in {"asks", "saves-slowly"} and this.rank == this.world_size - 1:
            slow_shares(write_slowly)
        batches = load() if CASE.startswith("loads") else repeat(None)
        next(batches)
        (FOLDER / f"runs-{this.rank}").write_text(str(os.getpid()))
        for step, _ in enumerate(batches, 1):
            state["w"] += 1
            time.sleep(0.05)
            if manager.step(step, state).stop:
                break
            if CASE == "asks" and this.rank == 2 and step == 10:
                manager.request_stop()
            if CASE == "crashes":
                crash_beside(this.rank)


if __name__ == "__main__":
    main()
