"""One of several ranks that stops in a C call: python stacks.py FOLDER RANK WORLD_SIZE OPTIONS-AS-JSON.

Rank `holds` is in a C call that holds Python's lock, the others in one that has released it. With `after_s`, a step
that takes longer has the stacks dumped; that is outside a pod, unless `in_pod` is set. There are `more_threads`.
"""

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper import CheckpointManager
from stepkeeper.training.environment import PodPaths
from stepkeeper_testing.pod import pod_environ, pod_identity


class Deadline(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def await_mutex(library: ctypes.CDLL, seconds: int) -> None:
    """Wait in C for a mutex that is locked: no signal ends that wait."""
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, ctypes.byref(Deadline(int(time.time()) + seconds, 0)))


def stand_still_with_the_lock(seconds: int) -> None:
    await_mutex(ctypes.PyDLL(None), seconds)


def stand_still_without_the_lock(seconds: int) -> None:
    await_mutex(ctypes.CDLL(None), seconds)


def open_manager(folder: Path, rank: int, world_size: int, options: dict[str, Any]) -> CheckpointManager:
    after_s = options.get("after_s", 300.0)
    if "after_s" in options and not options.get("in_pod"):
        return CheckpointManager(folder / "root", 1000, stacks_after_s=after_s)
    identity = pod_identity(hosts_per_slice=world_size, host_index=rank, pod=f"lm-{rank}")
    os.environ.update(pod_environ(identity))
    pod = folder / "pod"
    places = PodPaths(
        settings_folder=pod,
        notice_file=folder / f"notice.{rank}",
        termination_file=folder / f"termination.{rank}",
        token_file=pod / "token",
    )
    return CheckpointManager.from_env(places=places, stacks_after_s=after_s)


def stand_by(depth: int) -> None:
    if depth:
        stand_by(depth - 1)
    time.sleep(1000)


def main() -> None:
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    options = json.loads(sys.argv[4])
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=(folder / "ranks").as_uri(), rank=rank, world_size=world_size
        )
    state: dict[str, Any] = {"w": torch.zeros(10)}
    holds = options.get("holds") == rank
    for _ in range(options.get("more_threads", 0)):
        threading.Thread(target=stand_by, args=(20,), daemon=True).start()
    with open_manager(folder, rank, world_size, options) as manager:
        manager.restore_latest(state)
        for step in range(1, 11):
            manager.step(step, state)
            time.sleep(0.25)
        manager.save(11, state, force=True)
        # By the save all have met, and the companions are on their way to each other.
        time.sleep(1.0)
        print(json.dumps({"event": "stands"}), flush=True)
        if holds:
            stand_still_with_the_lock(options["seconds"])
        else:
            stand_still_without_the_lock(options["seconds"])
        print(json.dumps({"event": "goes"}), flush=True)


main()
