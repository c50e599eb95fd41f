"""One of several ranks whose training ends: python ending.py RANK WORLD_SIZE FOLDER CASE. It saves every 5 steps."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper import CheckpointManager
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.pod import pod_identity

LAST = 7


def end(case: str, rank: int, uri: str, state: dict[str, Any]) -> None:
    """Do what goes otherwise than planned after the last step, in one of the ranks."""
    match case:
        case "changed" if rank == 1:
            state["w"] += 1
        case "notice" | "told" if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        case "fenced" if rank == 0:
            Log(open_store(uri)).begin(pod_identity(restart_attempt=1), host="host-7")
        case "fails" if rank == 1:
            raise ZeroDivisionError("after the last step")
    dist.barrier()
    if case == "told":
        sys.exit()


def main() -> None:
    rank, world_size, folder, case = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo", init_method=(folder / "ranks").as_uri(), rank=rank, world_size=world_size)
    uri = (folder / "root").as_uri()
    state: dict[str, Any] = {"w": torch.zeros(100), "step": 0}
    total_steps = LAST if case == "total" else None
    n_steps = LAST - 1 if case == "uneven" and rank == 1 else LAST
    with CheckpointManager(uri, 5, total_steps=total_steps) as manager:
        manager.restore_latest(state)
        for step in range(1, n_steps + 1):
            state["w"] += 1
            state["step"] = step
            manager.step(step, state)
        manager.wait()
        end(case, rank, uri, state)


main()
