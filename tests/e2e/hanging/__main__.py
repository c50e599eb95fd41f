"""A training that hangs in its first attempt, in the way that its argument names, and is done in the next.

With "compile", its first step takes long, and with "endless" it is never done.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

import stepkeeper.distributed
from stepkeeper import CheckpointManager

FAULT = sys.argv[1]
HANGS_AT, N_STEPS, PACE_S = 14, 60, 0.3
LONG_COMPILATION_S = 60.0


class Endless(Dataset[int]):
    """A data set whose samples never come."""

    def __len__(self) -> int:
        return 1

    @override
    def __getitem__(self, index: int) -> int:
        time.sleep(10_000)
        return index


def spin() -> None:
    while True:
        pass


def hold_the_lock() -> None:
    """Read from a pipe into which nobody writes, in C code that keeps Python's lock."""
    reads, _writes = os.pipe()
    ctypes.PyDLL(None).read(reads, ctypes.create_string_buffer(1), 1)


def wait_for_data() -> None:
    for _ in DataLoader(Endless()):
        pass


def wait_for_a_key() -> None:
    store = TCPStore("localhost", 0, 1, is_master=True)
    store.get("a key that nobody sets")


FAULTS: dict[str, Callable[[], object]] = {
    "code": spin,
    "data": wait_for_data,
    "lock": hold_the_lock,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "store": wait_for_a_key,
}


def main() -> None:
    stepkeeper.distributed.init()
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any] = {"w": torch.zeros(10)}
    with CheckpointManager.from_env() as manager:
        restored = manager.restore(state)
        if FAULT == "compile":
            time.sleep(LONG_COMPILATION_S)
        n_steps = 10**9 if FAULT == "endless" else N_STEPS
        for step in range(restored.step + 1 if restored else 1, n_steps + 1):
            # The last rank hangs, and the others wait for it.
            if restored is None and step == HANGS_AT and rank == n_ranks - 1 and FAULT in FAULTS:
                FAULTS[FAULT]()
            dist.all_reduce(state["w"])
            if manager.step(step, state).stop:
                break
            time.sleep(PACE_S)


main()
