"""Many managers in one process, as an evaluator makes them: python many.py ROOT N. Nobody closes them."""

import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import torch

from stepkeeper import CheckpointManager

root, n_managers = sys.argv[1], int(sys.argv[2])


def n_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def left_of_it() -> list[str]:
    """Return a companion's process and the thread that listens to it, where they don't end by themselves."""
    ends_s = time.monotonic() + 30
    while True:
        left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        left += [thread.name for thread in threading.enumerate() if thread.name == "companion"]
        if not left or time.monotonic() > ends_s:
            return left
        time.sleep(0.05)


def with_a_commit() -> None:
    with CheckpointManager(root, 1) as manager:
        manager.save(1, {"w": torch.ones(4)})


def used(manager: CheckpointManager, number: int) -> None:
    assert manager.all_steps() == [1]
    state = {"w": torch.zeros(4)}
    if number % 10 == 0:
        manager.restore(1, state)
        assert state["w"].sum() == 4


def main() -> None:
    with_a_commit()
    fds, threads = n_fds(), threading.active_count()
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds + 20, fds + 20))
    kept = []
    for number in range(n_managers):
        manager = CheckpointManager(root, 10**6)
        used(manager, number)
        kept.append(manager)
    print(json.dumps({"fds": n_fds() - fds, "threads": threading.active_count() - threads}), flush=True)
    first = weakref.ref(kept[0])
    del manager
    kept.clear()
    gc.collect()
    print(json.dumps({"collected": first() is None, "fds": n_fds() - fds}), flush=True)
    # And one that trains is there no more either, with or without a companion process.
    for saves in (False, True):
        manager = CheckpointManager(root, 10**6)
        manager.save(2, {"w": torch.ones(4)}, force=saves)
        first = weakref.ref(manager)
        del manager
        gc.collect()
        print(json.dumps({"collected": first() is None, "left": left_of_it()}), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(10)


main()
