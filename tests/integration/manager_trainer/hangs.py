"""Two ranks that train together until one of them hangs: python hangs.py FOLDER RANK FAULT HUNG_RANK.

With the fault "loop", rank HUNG_RANK goes on once there is a file "go".
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from stepkeeper import CheckpointManager
from stepkeeper_testing.pod import pod_environ, pod_identity
from stepkeeper_testing.trainer import Mutex, join, places_in, say

FOLDER, RANK, FAULT, HUNG = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
PACE_S: Final = 0.3
HUNG_AT: Final = 10


class Endless(Dataset[int]):
    """A data set whose samples never come."""

    def __len__(self) -> int:
        return 1

    @override
    def __getitem__(self, index: int) -> int:
        Mutex().wait(600)
        return index


def spin_until_told() -> None:
    while not (FOLDER / "go").exists():
        pass


def wait_for_data() -> None:
    for _ in DataLoader(Endless()):
        pass


FAULTS: Final[dict[str, Callable[[], object]]] = {
    "loop": spin_until_told,
    "data": wait_for_data,
    "lock": lambda: Mutex().wait(600, hold_python=True),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def main() -> None:
    os.environ.update(pod_environ(pod_identity(hosts_per_slice=2, host_index=RANK, pod=f"lm-{RANK}")))
    join(RANK, 2, FOLDER)
    state: dict[str, Any] = {"w": torch.zeros(10)}
    with CheckpointManager.from_env(_places=places_in(FOLDER, RANK)) as manager:
        manager.restore(state)
        for step in range(1, 10_000):
            if step == 2:
                # By the save all have met, and the companions are on their way to each other.
                manager.save(1, state).result()
            if step == HUNG_AT - 2:
                with manager.phase("eval"):
                    time.sleep(2.5)
            if step == HUNG_AT and RANK == HUNG:
                say("hangs")
                FAULTS[FAULT]()
            dist.all_reduce(state["w"])
            manager.step(step, state)
            time.sleep(PACE_S)


main()
