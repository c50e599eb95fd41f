"""A trainer whose second save never gets to the root: python trainer.py FOLDER [told].

It says when its local disk has it. Told to stop by SIGTERM, it has 4 s, in which the root takes no third one either.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stepkeeper import CheckpointManager
from stepkeeper.contract import Interval, Settings
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper_testing.pod import pod_identity

FOLDER = Path(sys.argv[1])


def environment() -> Environment:
    places = PodPaths(
        settings_folder=FOLDER,
        notice_file=FOLDER / "notice",
        termination_file=FOLDER / "termination",
        token_file=FOLDER / "token",
    )
    settings = Settings(uri=(FOLDER / "root").as_uri(), interval=Interval(steps=1))
    return Environment(identity=pod_identity(grace_s=4), settings=settings, places=places)


def main() -> None:
    state: dict[str, Any] = {"w": torch.ones(3000), "n": 1}
    with CheckpointManager(
        (FOLDER / "root").as_uri(), 1, local_tier=FOLDER / "disk", environment=environment()
    ) as manager:
        assert manager.save(1, state)
        Path(os.environ["STEPKEEPER_TEST_HOLD"]).touch()
        state["w"] += 1
        state["n"] = 2
        manager.save_async(2, state)
        while not list((FOLDER / "disk").glob("*/2/*/*.distcp")):
            time.sleep(0.01)
        print("staged", flush=True)
        if sys.argv[2:] != ["told"]:
            time.sleep(60)
        state["n"] = 3
        os.kill(os.getpid(), signal.SIGTERM)
        while manager.health().notice is None:
            time.sleep(0.005)
        assert manager.step(3, state).stop


main()
