"""Fork workers while the first save starts the companion, then raise while they live: user_error.py ROOT-URI."""

import sys

import torch
from workers import PausedStart, end_workers

from stepkeeper import CheckpointManager

start = PausedStart()
workers: list[int] = []
try:
    with CheckpointManager(sys.argv[1], 1) as manager:
        manager.save_async(1, {"w": torch.arange(10)})
        workers += [start.fork(hooked=False) for _ in range(2)]
        raise ValueError("an error of the training")
finally:
    end_workers(workers)
