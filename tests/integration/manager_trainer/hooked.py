"""A rank whose hook verifies each commit while training goes on: python hooked.py RANK WORLD_SIZE FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from stepkeeper import CheckpointManager, SaveReport

RANK, WORLD_SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


def main() -> None:
    store = FileStore(str(FOLDER / "store"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE)
    verified: list[int] = []
    state = {"w": torch.zeros(5000)}
    with CheckpointManager((FOLDER / "root").as_uri(), 2) as manager:

        def verify(report: SaveReport) -> None:
            manager.verify(report.step)
            verified.append(report.step)

        manager.on_save(verify)
        for step in range(1, 7):
            state["w"] += step
            manager.step(step, state)
    assert verified == [2, 4, 6], verified
    dist.destroy_process_group()


main()
