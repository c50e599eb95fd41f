"""A rank whose saves make others superfluous: python evicting.py RANK WORLD_SIZE FOLDER CASE."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper import CheckpointManager

RANK, WORLD_SIZE, FOLDER, CASE = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
ROOT = FOLDER / "root"


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "step": step}


def evict_together() -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{FOLDER}/rendezvous", rank=RANK, world_size=WORLD_SIZE
    )
    manager = CheckpointManager(ROOT, 1, max_to_keep=2)
    for step in range(1, 8):
        manager.save(step, state_of(step))
        assert manager.all_steps() == [step - 1, step][-step:], (step, manager.all_steps())
    for step in range(8, 15):
        manager.save_async(step, state_of(step))
    manager.join()
    assert manager.all_steps() == [13, 14], manager.all_steps()
    assert sorted(int(path.parts[-3]) for path in ROOT.glob("*/*/.metadata")) == [13, 14]
    manager.close()


def join_while_deletions_are_stuck() -> None:
    with CheckpointManager(ROOT, 10, max_to_keep=1) as manager:
        manager.save_async(20, state_of(20))
        assert manager.in_flight is not None
        manager.in_flight.result()
        pid = manager.health().companion_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        print(json.dumps({"pid": pid}), flush=True)
        manager.join()
        assert manager.health().notice == "sigterm"


evict_together() if CASE == "together" else join_while_deletions_are_stuck()
