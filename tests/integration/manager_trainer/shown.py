"""A trainer in a container that an operator made. It leaves logging as Python has it, or configures its own."""

import logging
import sys
import time
from pathlib import Path

import torch

from stepkeeper import CheckpointManager
from stepkeeper.restore import progress
from stepkeeper.storage.posix import PosixStore
from stepkeeper.training.environment import PodPaths

folder, configured, slow = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "slow"
if configured == "before":
    logging.basicConfig(level=logging.WARNING, format="own %(message)s")
places = PodPaths(
    settings_folder=folder,
    notice_file=folder / "notice",
    termination_file=folder / "termination",
    token_file=folder / "token",
)
read = PosixStore.read


def read_slowly(store: PosixStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
    if path.endswith(".distcp"):
        time.sleep(0.2)
    return read(store, path, offset, length)


if slow:
    # The same lines as after 5 s each, sooner.
    vars(progress)["_EVERY_S"] = 0.05
    setattr(PosixStore, "read", read_slowly)  # noqa: B010  # a checker would want the same signature
state = {"w": torch.zeros(8), "v": torch.zeros(6 * 2**20)}
with CheckpointManager.from_env(places=places) as manager:
    if configured == "after":
        logging.basicConfig(level=logging.INFO, format="own %(message)s")
    restored = manager.restore_latest(state)
    step = restored.step if restored else 0
    manager.step(step + 1, state)
    manager.wait()
    if restored:
        manager.request_stop()
        while not manager.step(step + 2, state).stop:
            step += 1
