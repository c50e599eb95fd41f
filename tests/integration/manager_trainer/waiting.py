"""A rank that waits for what won't come: python waiting.py FOLDER RANK WORLD_SIZE CASE OPTIONS-AS-JSON."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepkeeper import CheckpointManager
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.ending import schedule
from stepkeeper_testing.trainer import Mutex, in_pod, say, slow_shares
from stepkeeper_testing.trainer import join as join_group

FOLDER, RANK, WORLD_SIZE, CASE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
OPTIONS = json.loads(sys.argv[5])
STATE: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}


def open_manager(interval: int = 10**6) -> CheckpointManager:
    """With what an operator has told, which includes the grace period; alone where it is not known."""
    if "grace_s" in OPTIONS:
        return in_pod(FOLDER, RANK, steps=interval, grace_s=OPTIONS["grace_s"])
    schedule._SILENCE_S = OPTIONS["silence_s"]  # type: ignore[misc]  # what is tested isn't how long it is
    return CheckpointManager(FOLDER / "root", save=interval)


def join() -> None:
    if WORLD_SIZE > 1:
        join_group(RANK, WORLD_SIZE, FOLDER, OPTIONS.get("timeout_s", 60.0))


def wait_in(call: str) -> None:
    """Save step 1, stop the companion, and wait in `call` for what it never does. The test sends SIGTERM."""
    with open_manager(1000) as manager:
        if call != "restore":
            manager.restore(STATE)
        manager.save(1, STATE).result()
        companion = manager.health().companion_pid
        assert companion is not None
        os.kill(companion, signal.SIGSTOP)
        say("companion", pid=companion)
        if call not in ("restore", "save"):
            manager.save(2, STATE)
        calls: dict[str, Callable[[], object]] = {
            "step": lambda: manager.step(10**6, STATE),
            "save": lambda: manager.save(2, STATE).result(),
            "wait": manager.wait,
            "restore": lambda: manager.restore(STATE),
            "end": lambda: None,
        }
        say("waits")
        calls[call]()
        if call != "end":
            assert manager.health().notice == "sigterm"


def go_on(manager: CheckpointManager, leave: Callable[[int], None]) -> None:
    for step in range(2, 10**6):
        STATE["step"] = step
        leave(step)
        if manager.step(step, STATE).stop:
            return
        note("trains")
        say("step", step=step)
        time.sleep(0.05)


def note(what: str) -> None:
    (FOLDER / f"{what}.{RANK}").touch()


def await_all(what: str, n_ranks: int) -> None:
    """Wait until so many ranks have noted that: one that is still in the save before needs the others, and a store."""
    while len(list(FOLDER.glob(f"{what}.*"))) < n_ranks:
        time.sleep(0.02)


def pause() -> None:
    say("paused")
    os.kill(os.getpid(), signal.SIGSTOP)
    # Another thread may get the signal, and this one runs on for a moment.
    time.sleep(5)


def lose_peer(_: str) -> None:
    """The test kills a rank, and no collective of the training tells the others."""
    join()
    with open_manager(OPTIONS["interval"]) as manager:
        manager.restore(STATE)
        manager.save(1, STATE).result()
        say("start")
        go_on(manager, lambda _step: None)


def stand_still(phase: str) -> None:
    """A rank stands still, rank 0 with the store or another; the others come to `phase`, which needs it.

    The test sends SIGTERM, or nothing.
    """
    join()
    is_still = OPTIONS.get("still", 0) == RANK

    def stand_in_training(step: int) -> None:
        if is_still and step == 4:
            await_all("trains", WORLD_SIZE)
            pause()

    def write_and_pause(write: Any, *args: Any, **options: Any) -> Any:
        written = write(*args, **options)
        group = manager._parts.rank_group
        assert isinstance(group, StoreRankGroup)
        # Only a rank that has promised beats is missed soon.
        while not group._read_beats(RANK)[0]:
            time.sleep(0.01)
        pause()
        return written

    with open_manager() as manager:
        manager.restore(STATE)
        manager.save(1, STATE).result()
        if phase == "train":
            go_on(manager, stand_in_training)
            return
        if phase == "wait" and not is_still:
            manager.save(2, STATE)
        if is_still:
            await_all("waits", WORLD_SIZE - 1)
        else:
            note("waits")
        if is_still and phase == "vote":
            # Its share of the next save is durable then, and it hasn't said so.
            slow_shares(write_and_pause)
        elif is_still:
            # The notice must find a train thread that waits, not a round of the agreement.
            time.sleep(1)
            pause()
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: manager.save(2, STATE).result(),
            "vote": lambda: manager.save(2, STATE).result(),
            "wait": manager.wait,
            "restore": lambda: manager.restore(STATE),
            "end": lambda: None,
        }
        say("waits")
        calls[phase]()


def stand_in_c(_: str) -> None:
    """Save step 1, and be in a C call from step 6 on, with Python's lock released, until the test makes `go`."""
    mutex = Mutex()

    def watch() -> None:
        while manager.health().notice is None:
            time.sleep(0.005)
        say("knows", of=manager.health().notice, at_s=time.monotonic())
        while not (FOLDER / "go").exists():
            time.sleep(0.02)
        mutex.unlock()

    join()
    with open_manager() as manager:
        manager.restore(STATE)
        manager.save(1, STATE).result()
        for step in range(2, 10**6):
            STATE["step"] = step
            if manager.step(step, STATE).stop:
                say("stops", step=step)
                return
            if step == 6:
                threading.Thread(target=watch, daemon=True).start()
                say("stands")
                mutex.wait(30.0)
            time.sleep(0.02)


KINDS = {
    "wait": wait_in,
    "lose": lose_peer,
    "still": stand_still,
    "stands": stand_in_c,
}
kind, _, detail = CASE.partition("-")
KINDS[kind](detail)
