"""Print in a line of JSON what saves compile, and that a step compiles nothing again: python compiling.py FOLDER."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch_xla.runtime as xr
from sharded_training import Training, compilations

from stepkeeper import CheckpointManager

STEPS, EVERY = 60, 20


def without() -> None:
    training = Training(width=64)
    for _ in range(STEPS):
        training.step()


def behind_the_sync(root: Path) -> None:
    training = Training(width=64)
    with CheckpointManager(str(root), save=EVERY) as manager:
        for step in range(1, STEPS + 1):
            training.step()
            manager.step(step, training.state)
        manager.wait()
        assert len(manager.steps()) == STEPS // EVERY


def preempted(root: Path) -> int:
    """Compilations from the notice on, which is the first that is saved; of a state that was never saved before."""
    training = Training(width=48)
    compiled = 0
    try:
        with CheckpointManager(str(root), save=10**6) as manager:
            training.step()
            assert manager.restore(training.state) is None
            for step in range(1, 10**6):
                training.step()
                if step == 5:
                    compiled = compilations()
                    os.kill(os.getpid(), signal.SIGTERM)
                if manager.step(step, training.state).stop:
                    break
                if step > 5:
                    time.sleep(0.01)
    except SystemExit as end:
        return compilations() - compiled if end.code == 75 else -1
    return -1


def main() -> None:
    xr.use_spmd()
    folder = Path(sys.argv[1])
    without()
    counts = {"without": compilations()}
    behind_the_sync(folder / "behind")
    counts["with"] = compilations()
    counts["for a notice"] = preempted(folder / "preempted")
    print(json.dumps(counts), flush=True)


main()
