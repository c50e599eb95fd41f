"""Train in a pod after looking into another job's root, which lets nobody in: python warm_start.py POD OTHER WAY."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from stepkeeper import CheckpointManager
from stepkeeper.errors import OtherJobsRootError
from stepkeeper.training.environment import PodPaths

STATE: Final = {"w": torch.zeros(4)}


def try_root(uri: str) -> CheckpointManager:
    other = CheckpointManager(uri)
    try:
        other.restore_latest(STATE)
    except OtherJobsRootError:
        return other
    raise AssertionError("another job's root let this one in")


def train(folder: Path, other_uri: str, way: str) -> None:
    places = PodPaths(
        settings_folder=folder,
        notice_file=folder / "notice",
        termination_file=folder / "termination",
        token_file=folder / "token",
    )
    with CheckpointManager.from_env(places=places) as manager:
        manager.restore_latest(STATE)
        other = try_root(other_uri)
        for step in range(1, 4):
            if way == "told" and step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                manager._parts.controller.notices.read_notice()
            if manager.step(step, STATE).stop:
                break
        with suppress(OtherJobsRootError):
            other.restore_latest(STATE)


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
