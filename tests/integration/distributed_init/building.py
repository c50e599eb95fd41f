"""Form the process group, and build the model for ever, without a manager yet: building.py SIGN [deaf].

Or be done with that, and wait for those who aren't: building.py SIGN restores FOLDER.
"""

import ctypes
import sys
import time
from pathlib import Path

import torch

import stepkeeper
from stepkeeper import CheckpointManager
from stepkeeper.training.environment import PodPaths


def restore(folder: Path) -> None:
    places = PodPaths(
        settings_folder=folder,
        notice_file=folder / "notice",
        termination_file=folder / "termination",
        token_file=folder / "token",
    )
    with CheckpointManager.from_env(places=places) as manager:
        manager.restore_latest({"w": torch.zeros(4)})


if __name__ == "__main__":
    stepkeeper.distributed.init()
    Path(sys.argv[1]).touch()
    if "restores" in sys.argv:
        restore(Path(sys.argv[3]))
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2 if "deaf" in sys.argv else 0):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
    time.sleep(600)
