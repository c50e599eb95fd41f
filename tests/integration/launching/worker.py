"""One process of a training under torchrun, as in a pod: python worker.py FOLDER CASE."""

import os
import sys
import time
from pathlib import Path

import torch

import stepkeeper
from stepkeeper import CheckpointManager
from stepkeeper.training.environment import PodPaths

FOLDER = Path(sys.argv[1])
CASE = sys.argv[2]


def main() -> None:
    this = stepkeeper.distributed.init(timeout_s=120)
    places = PodPaths(
        settings_folder=FOLDER,
        notice_file=FOLDER / "notice",
        termination_file=FOLDER / "termination",
        token_file=FOLDER / "token",
    )
    state = {"w": torch.zeros(4)}
    with CheckpointManager.from_env(places=places) as manager:
        restored = manager.restore_latest(state)
        step = restored.step if restored else 0
        if CASE == "fails-once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and this.rank == 1:
            raise ValueError("the loss is no number")
        (FOLDER / f"runs-{this.rank}").touch()
        while CASE != "fails-once" or step < 3:
            step += 1
            state["w"] += 1
            time.sleep(0.05)
            if manager.step(step, state).stop:
                break


if __name__ == "__main__":
    main()
