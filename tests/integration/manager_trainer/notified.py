"""One of several ranks that train until a notice: python notified.py FOLDER RANK WORLD_SIZE OPTIONS-AS-JSON.

It commits its first step. With `stands_s` its main thread is then for so long in a C call that has released Python's
lock, or until the test has made the file `go`. With `asks`, the rank of that number asks for the stop itself, by a
`call` or as by a `directive` that has come. The save then takes `save_s`.
"""

import ctypes
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper import CheckpointManager
from stepkeeper.contract import Directive, Interval, Settings
from stepkeeper.save import persist
from stepkeeper.save.share import write_share
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper_testing.pod import pod_identity

FOLDER, RANK, WORLD_SIZE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
OPTIONS = json.loads(sys.argv[4])
SAYING = threading.Lock()


class Deadline(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def say(event: str, **values: Any) -> None:
    with SAYING:
        print(json.dumps({"event": event, **values}), flush=True)


def environment() -> Environment:
    places = PodPaths(
        settings_folder=FOLDER,
        notice_file=FOLDER / f"notice.{RANK}",
        termination_file=FOLDER / f"termination.{RANK}",
        token_file=FOLDER / "token",
    )
    settings = Settings(uri=(FOLDER / "root").as_uri(), interval=Interval(steps=10**6))
    identity = pod_identity(grace_s=OPTIONS["grace_s"], restart_attempt=OPTIONS.get("start", 0))
    return Environment(identity=identity, settings=settings, places=places)


def stand_in_c(manager: CheckpointManager) -> None:
    """Wait in C for a mutex that another thread holds. No signal ends that wait, and no Python handler runs in it."""
    library, mutex, held = ctypes.CDLL(None), ctypes.create_string_buffer(64), threading.Event()

    def hold() -> None:
        library.pthread_mutex_lock(mutex)
        held.set()
        while manager.health().notice is None:
            time.sleep(0.005)
        say("knows", of=manager.health().notice, at_s=time.monotonic())
        while not (FOLDER / "go").exists():
            time.sleep(0.02)
        library.pthread_mutex_unlock(mutex)

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    say("stands")
    ends_s = int(time.time()) + OPTIONS["stands_s"]
    library.pthread_mutex_timedlock(mutex, ctypes.byref(Deadline(ends_s, 0)))


def ask_for_stop(manager: CheckpointManager) -> None:
    def write_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(OPTIONS["save_s"])
        return write_share(*args, **kwargs)

    persist.write_share = write_slowly  # type: ignore[attr-defined]  # the name that is called
    if OPTIONS["asks"].get("call") == RANK:
        manager.request_stop()
    if OPTIONS["asks"].get("directive") == RANK:
        manager._parts.controller.follow_directive(Directive(stop=True))


def train(manager: CheckpointManager) -> None:
    size = OPTIONS.get("size", 1000)
    state: dict[str, Any] = {"w": torch.zeros(size), "step": 0}
    restored = manager.restore_latest(state)
    first = restored.step + 1 if restored else 1
    say("start", step=first - 1, least=state["w"].min().item(), most=state["w"].max().item())
    for step in range(first, first + OPTIONS.get("steps", 10**6)):
        state["w"] += 1
        state["step"] = step
        if step == 1:
            manager.save(step, state, force=True)
            say("saved", companion=manager.health().companion_pid)
        if manager.step(step, state).stop:
            say("stops", step=step)
            return
        if step == first + 5 and "stands_s" in OPTIONS:
            stand_in_c(manager)
        if step == first + 5 and "asks" in OPTIONS:
            ask_for_stop(manager)
        time.sleep(0.02)


def main() -> None:
    if WORLD_SIZE > 1:
        ranks = FOLDER / f"ranks.{OPTIONS.get('start', 0)}"
        dist.init_process_group("gloo", init_method=ranks.as_uri(), rank=RANK, world_size=WORLD_SIZE)
    with CheckpointManager((FOLDER / "root").as_uri(), 10**6, environment=environment()) as manager:
        train(manager)


main()
