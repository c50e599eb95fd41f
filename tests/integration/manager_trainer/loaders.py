"""A trainer whose DataLoader's workers die while its last save is written: python loaders.py FOLDER."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from stepkeeper import CheckpointManager
from stepkeeper.save import persist as persist_module


def main(folder: Path) -> None:
    data: Any = list(range(64))
    batches: Any = iter(DataLoader(data, num_workers=2, multiprocessing_context="fork"))
    next(batches)
    persist: Any = persist_module
    write = persist.write_share

    def write_while_they_die(*args: Any, **options: Any) -> Any:
        for worker in batches._workers:
            worker.kill()
        time.sleep(1.0)
        return write(*args, **options)

    persist.write_share = write_while_they_die
    state: dict[str, Any] = {"w": torch.zeros(4)}
    with CheckpointManager((folder / "root").as_uri(), 10**6) as manager:
        manager.restore_latest(state)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        for step in range(1, 10**6):
            time.sleep(0.02)
            if manager.step(step, state).stop:
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
