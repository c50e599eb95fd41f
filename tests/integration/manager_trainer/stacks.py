"""One of several ranks that stops in a C call: python stacks.py FOLDER RANK WORLD_SIZE OPTIONS-AS-JSON.

Rank `holds` is in a C call that holds Python's lock, the others in one that has released it. With `after_s`, a step
that takes longer has the stacks dumped.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stepkeeper import CheckpointManager, Options
from stepkeeper_testing.pod import pod_environ, pod_identity
from stepkeeper_testing.trainer import Mutex, join, places_in, say

FOLDER, RANK, WORLD_SIZE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
OPTIONS = json.loads(sys.argv[4])
FOR_EVER_S = 600


def stand_still_with_the_lock() -> None:
    Mutex().wait(FOR_EVER_S, hold_python=True)


def stand_still_without_the_lock() -> None:
    Mutex().wait(FOR_EVER_S)


def open_manager() -> CheckpointManager:
    if not (FOLDER / "settings.json").exists():
        return CheckpointManager(
            FOLDER / "root", save=1000, options=Options(stacks_after_s=OPTIONS["after_s"])
        )
    os.environ.update(
        pod_environ(pod_identity(hosts_per_slice=WORLD_SIZE, host_index=RANK, pod=f"lm-{RANK}"))
    )
    return CheckpointManager.from_env(
        _places=places_in(FOLDER, RANK), options=Options(stacks_after_s=OPTIONS.get("after_s", 300.0))
    )


def main() -> None:
    if WORLD_SIZE > 1:
        join(RANK, WORLD_SIZE, FOLDER)
    state: dict[str, Any] = {"w": torch.zeros(10)}
    with open_manager() as manager:
        manager.restore(state)
        for step in range(1, 11):
            manager.step(step, state)
            time.sleep(0.25)
        manager.save(11, state).result()
        # By the save all have met, and the companions are on their way to each other.
        time.sleep(1.0)
        say("stands")
        stand_still_with_the_lock() if OPTIONS.get("holds") == RANK else stand_still_without_the_lock()


main()
