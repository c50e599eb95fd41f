"""A script that spawns the processes of its training itself, as in a pod: python spawning.py FOLDER METHOD."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper import CheckpointManager
from stepkeeper_testing.trainer import places_in

N_RANKS = 2


def say(event: str, **values: object) -> None:
    os.write(1, f"{json.dumps({'event': event, **values})}\n".encode())


def train(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=(folder / "ranks").as_uri(), rank=rank, world_size=N_RANKS)
    state: dict[str, Any] = {"w": torch.zeros(4), "step": 0}
    with CheckpointManager.from_env(_places=places_in(folder)) as manager:
        manager.restore(state)
        say("runs")
        for step in range(1, 10**6):
            state["w"] += 1
            time.sleep(0.02)
            if manager.step(step, state).stop:
                say("stops", step=step)
                break


if __name__ == "__main__":
    torch.multiprocessing.start_processes(  # type: ignore[attr-defined]  # torch does not list it
        train, (Path(sys.argv[1]),), nprocs=N_RANKS, start_method=sys.argv[2]
    )
