"""A training that `stepkeeper run` supervises: python training.py FOLDER N_STEPS CASE.

Its folder gets a file with the pid of each rank.
"""

import os
import random
import sys
import time
from pathlib import Path

import torch

import stepkeeper
from stepkeeper import CheckpointManager, RandomState, prime_optimizer

FOLDER, N_STEPS, CASE = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def disturb(step: int, start: int) -> None:
    """Do what the case is about, in the middle of a step."""
    if CASE == "crashes-once" and step == 7 and start == 1:
        raise ValueError("a bad batch")
    if CASE == "crashes-at-once":
        raise ValueError("a bad batch")
    if CASE == "hangs" and step == 30:
        (FOLDER / "hangs").touch()
        while True:
            time.sleep(0.1)
    if CASE == "cannot-resume" and start > 1:
        raise ValueError("the data isn't there")


def main() -> None:
    this = stepkeeper.distributed.init()
    torch.manual_seed(this.rank)
    random.seed(0)
    (FOLDER / f"pid-{this.rank}").write_text(str(os.getpid()))
    with CheckpointManager.from_env() as manager:
        model = torch.nn.Linear(4, 1)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        optimizer = torch.optim.AdamW(model.parameters())
        prime_optimizer(optimizer)
        state = {"model": model, "optimizer": optimizer}
        if CASE != "forgets-random":
            state["random"] = RandomState()
        restored = manager.restore(state)
        start = restored.step + 1 if restored else 1
        for step in range(start, N_STEPS + 1):
            disturb(step, start)
            # Equal on all ranks, as after an all-reduce.
            loss = model(torch.ones(4)).sum() * random.random()
            if this.world_size == 1:
                loss = loss * torch.rand(())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
            metrics = None if CASE == "logs-nothing" else {"loss": loss}
            if manager.step(step, state, metrics).stop:
                break


if __name__ == "__main__":
    main()
