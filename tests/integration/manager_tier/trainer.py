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

from stepkeeper import Options
from stepkeeper_testing.trainer import in_pod

FOLDER = Path(sys.argv[1])


def main() -> None:
    state: dict[str, Any] = {"w": torch.ones(3000), "n": 1}
    options = Options(local_tier=FOLDER / "disk")
    with in_pod(FOLDER, steps=1, grace_s=4, options=options) as manager:
        manager.save(1, state).result()
        Path(os.environ["STEPKEEPER_TEST_HOLD_FILE"]).touch()
        state["w"] += 1
        state["n"] = 2
        manager.save(2, state)
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
