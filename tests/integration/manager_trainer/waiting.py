"""A rank that waits for what won't come: python waiting.py FOLDER RANK WORLD_SIZE CASE OPTIONS-AS-JSON."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper import CheckpointManager
from stepkeeper.contract import Interval, Settings
from stepkeeper.save import persist
from stepkeeper.save.share import write_share
from stepkeeper.storage.posix import PosixStore
from stepkeeper.training import grace_period
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper_testing.pod import pod_identity

FOLDER, RANK, WORLD_SIZE, CASE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
OPTIONS = json.loads(sys.argv[5])
ROOT = FOLDER / "root"
STATE: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def environment() -> Environment | None:
    """Return what an operator has told, which includes the grace period; None where nobody has said that."""
    if "grace_s" not in OPTIONS:
        grace_period._SILENCE_S = OPTIONS["silence_s"]  # type: ignore[misc]  # what is tested isn't how long it is
        return None
    identity = pod_identity(grace_s=OPTIONS["grace_s"])
    places = PodPaths(
        settings_folder=FOLDER,
        notice_file=FOLDER / f"notice.{RANK}",
        termination_file=FOLDER / f"termination.{RANK}",
        token_file=FOLDER / "token",
    )
    return Environment(
        identity=identity,
        settings=Settings(uri=ROOT.as_uri(), interval=Interval(steps=1000)),
        places=places,
    )


def join() -> None:
    port_file = FOLDER / "port"
    if RANK == 0:
        store = TCPStore("localhost", 0, WORLD_SIZE, is_master=True, wait_for_workers=False)
        (FOLDER / "port.new").write_text(str(store.port))
        (FOLDER / "port.new").rename(port_file)
    else:
        while not port_file.exists():
            time.sleep(0.01)
        store = TCPStore("localhost", int(port_file.read_text()), WORLD_SIZE, is_master=False)
    timeout = timedelta(seconds=OPTIONS.get("timeout_s", 60))
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE, timeout=timeout)


def stop_companion(manager: CheckpointManager) -> int:
    """Make it answer nothing any more, as where its file system hangs."""
    pid = manager.health().companion_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def wait_in(call: str) -> None:
    """Save step 1, stop the companion, and wait in `call` for what it never does. The test sends SIGTERM."""
    with CheckpointManager(ROOT.as_uri(), 1000, environment=environment()) as manager:
        if call != "restore_latest":
            manager.restore_latest(STATE)
        manager.save(1, STATE, force=True)
        say("companion", pid=stop_companion(manager))
        if call not in ("restore_latest", "save"):
            manager.save_async(2, STATE, force=True)
        in_flight = manager.in_flight

        def result() -> None:
            assert in_flight is not None
            in_flight.result()

        calls: dict[str, Callable[[], object]] = {
            "step": lambda: manager.step(1000, STATE),
            "save": lambda: manager.save(2, STATE, force=True),
            "save_async": lambda: manager.save_async(3, STATE, force=True),
            "wait": manager.wait,
            "join": manager.join,
            "close": manager.close,
            "restore": lambda: manager.restore(1, STATE),
            "restore_latest": lambda: manager.restore_latest(STATE),
            "verify": lambda: manager.verify(1),
            "result": result,
            "end": lambda: None,
        }
        say("waits")
        calls[call]()
        if call != "end":
            assert manager.health().notice == "sigterm"


def read_in(call: str) -> None:
    """Save step 1, let the store give no answer from a point on, and read in `call`. The test sends SIGTERM."""
    name, _, hangs_at = call.partition("-")
    with CheckpointManager(ROOT.as_uri(), 1000, environment=environment()) as manager:
        manager.restore_latest(STATE)
        manager.save(1, STATE, force=True)
        manager.wait()
        read = PosixStore.read

        def hang(store: PosixStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
            if not hangs_at or path.endswith(hangs_at):
                say("waits")
                threading.Event().wait()
            return read(store, path, offset, length)

        PosixStore.read = hang  # type: ignore[method-assign, assignment]  # a mount that hangs
        calls: dict[str, Callable[[], object]] = {
            "restore_latest": lambda: manager.restore_latest(STATE),
            "restore": lambda: manager.restore(1, STATE),
            "verify": lambda: manager.verify(1),
            "metadata": lambda: manager.metadata(1),
            "all_steps": manager.all_steps,
        }
        calls[name]()


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


def leave_by(how: str, rank: int = WORLD_SIZE - 1) -> Callable[[int], None]:
    def leave(step: int) -> None:
        if rank != RANK or step != OPTIONS.get("at", 4):
            return
        if how == "raise":
            raise ValueError("a bug of its own")
        if how == "exit":
            os._exit(1)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "pause":
            await_all("trains", WORLD_SIZE)
            say("paused")
            os.kill(os.getpid(), signal.SIGSTOP)

    return leave


def lose_peer(how: str) -> None:
    """One rank goes, or stands still, and no collective of the training tells the others."""
    join()
    try:
        with CheckpointManager(ROOT.as_uri(), OPTIONS["interval"], environment=environment()) as manager:
            manager.restore_latest(STATE)
            manager.save(1, STATE, force=True)
            say("start")
            go_on(manager, leave_by(how))
    finally:
        say("left")
        time.sleep(OPTIONS.get("tidies_s", 0))


def stand_still(phase: str) -> None:
    """A rank stands still, rank 0 with the store or another; the others come to `phase`, which needs it.

    The test sends SIGTERM, or nothing.
    """
    join()
    still = OPTIONS.get("still", 0)
    with CheckpointManager(ROOT.as_uri(), 10**6, environment=environment()) as manager:
        manager.restore_latest(STATE)
        manager.save(1, STATE, force=True)
        say("start")
        if phase == "train":
            go_on(manager, leave_by("pause", rank=still))
            return
        if phase == "wait":
            manager.save_async(2, STATE, force=still != RANK)
        if still == RANK:
            await_all("waits", WORLD_SIZE - 1)
        else:
            note("waits")
        if phase == "vote" and still == RANK:
            stop_before_the_vote()
        elif still == RANK:
            # The notice must find a train thread that waits, not a round of the agreement.
            time.sleep(1)
            say("paused")
            os.kill(os.getpid(), signal.SIGSTOP)
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: manager.save(2, STATE, force=True),
            "vote": lambda: manager.save(2, STATE, force=True),
            "wait": manager.wait,
            "restore_latest": lambda: manager.restore_latest(STATE),
            "restore": lambda: manager.restore(1, STATE),
            "verify": lambda: manager.verify(1),
            "close": manager.close,
            "end": lambda: None,
        }
        say("waits")
        calls[phase]()


def stop_before_the_vote() -> None:
    """Stop this process when its share of the next save is durable, before it has said so."""

    def write_and_stop(*args: Any, **options: Any) -> Any:
        written = write_share(*args, **options)
        say("paused")
        os.kill(os.getpid(), signal.SIGSTOP)
        return written

    persist.write_share = write_and_stop  # type: ignore[attr-defined]  # the name that is called


def come_late(*, has_manager: bool) -> None:
    """The last rank, or another, builds its model for as long as the test takes. The test sends SIGTERM to others.

    Args:
        has_manager: True if it has constructed its manager before.

    """
    join()
    is_late = OPTIONS.get("late", WORLD_SIZE - 1) == RANK
    if is_late and not has_manager:
        time.sleep(600)
    with CheckpointManager(ROOT.as_uri(), 10**6, environment=environment()) as manager:
        if is_late:
            time.sleep(600)
        say("waits")
        manager.restore_latest(STATE)


def unclosed() -> None:
    """Use the manager as torch_xla's is used. The last rank is done, and gone, before the others are."""
    join()
    manager = CheckpointManager(ROOT.as_uri(), 1)
    for step in range(1, 4):
        manager.save(step, STATE)
    if RANK == WORLD_SIZE - 1:
        return
    time.sleep(3)
    manager.join()
    assert not manager.wait() or manager.all_steps() == [1, 2, 3]


def main() -> None:
    kind, _, detail = CASE.partition("-")
    if kind == "wait":
        wait_in(detail)
    elif kind == "lose":
        lose_peer(detail)
    elif kind == "read":
        read_in(detail)
    elif kind == "still":
        stand_still(detail)
    elif kind == "late":
        come_late(has_manager=detail == "manager")
    else:
        unclosed()


main()
