"""A trainer that is told to stop when something else is wrong too: python told.py FOLDER CASE."""

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from stepkeeper import CheckpointManager
from stepkeeper.contract import Interval, Settings
from stepkeeper.policy.save import SaveCost
from stepkeeper.save import persist
from stepkeeper.save.share import write_share
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper_testing.pod import pod_identity

FOLDER = Path(sys.argv[1])
ROOT = FOLDER / "root"


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def environment(grace_s: int) -> Environment:
    identity = pod_identity(grace_s=grace_s)
    places = PodPaths(
        settings_folder=FOLDER,
        notice_file=FOLDER / "notice",
        termination_file=FOLDER / "termination",
        token_file=FOLDER / "token",
    )
    settings = Settings(uri=ROOT.as_uri(), interval=Interval(steps=1000))
    return Environment(identity=identity, settings=settings, places=places)


def delays_s() -> dict[str, float]:
    """By thread, how long it could have run by now and had no processor: other processes had them."""
    delays = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            delays[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return delays


def left(told_s: float, before: dict[str, float]) -> None:
    """Print how long this took since `told_s`, as on a machine with nothing else to do."""
    waited_s = sum(delay_s - before.get(thread, 0.0) for thread, delay_s in delays_s().items())
    say("left", told_s=told_s, after_s=time.monotonic() - told_s - waited_s)


def tell(manager: CheckpointManager) -> None:
    atexit.register(left, time.monotonic(), delays_s())
    os.kill(os.getpid(), signal.SIGTERM)
    while manager.health().notice is None:
        time.sleep(0.01)


def chosen_end(manager: CheckpointManager, state: dict[str, Any]) -> None:
    """The script has its own handler, and had no use for ours."""
    manager.save_async(2, state, force=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    tell(manager)


def left_between(manager: CheckpointManager, state: dict[str, Any]) -> None:
    """The script ends itself behind a step."""
    assert not manager.step(2, state).stop
    tell(manager)
    sys.exit(0)


def left_within(manager: CheckpointManager, state: dict[str, Any]) -> None:
    """The script's handler ends it within the step that follows."""
    assert not manager.step(2, state).stop
    state["batches"] += 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    tell(manager)


def failed_before(manager: CheckpointManager, state: dict[str, Any]) -> None:
    """A save in the background failed, and the store works again."""
    (ROOT / "2").touch()
    assert manager.save_async(2, state, force=True)
    while manager.health().error is None:
        time.sleep(0.01)
    (ROOT / "2").unlink()
    tell(manager)
    assert manager.step(3, state).stop


class LongEnd:
    """Takes its time when the interpreter is taken down, as a library may."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(20)


def long_end(manager: CheckpointManager, state: dict[str, Any]) -> None:
    json.kept = LongEnd()  # type: ignore[attr-defined]  # a module's values go when no thread of Python runs any more
    tell(manager)
    stop_from(2, manager, state)


def stuck(manager: CheckpointManager, state: dict[str, Any]) -> None:
    pid = manager.health().companion_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    tell(manager)
    stop_from(2, manager, state)


def stop_from(first: int, manager: CheckpointManager, state: dict[str, Any]) -> None:
    """Train until `step` says stop: the thread that hears of the notice asks for that a moment after it is known."""
    assert any(manager.step(step, state).stop for step in range(first, 1000))


def told_in_mid_save(manager: CheckpointManager, state: dict[str, Any], save_s: float) -> None:
    """A save that is taken to need so long is in flight, and ends once it is chosen whether one more is made."""
    manager._parts.saver._recent_costs.cost = SaveCost(stall_s=0.1, duration_s=save_s)
    stop_save = manager._parts.controller.stop_save

    def write_once_chosen(*args: Any, **kwargs: Any) -> Any:
        while stop_save.choice is None:
            time.sleep(0.01)
        return write_share(*args, **kwargs)

    persist.write_share = write_once_chosen  # type: ignore[attr-defined]  # the name that is called
    manager.save_async(2, state, force=True)
    tell(manager)
    stop_from(3, manager, state)


def time_for_one(manager: CheckpointManager, state: dict[str, Any]) -> None:
    told_in_mid_save(manager, state, 1000.0)


def time_for_both(manager: CheckpointManager, state: dict[str, Any]) -> None:
    told_in_mid_save(manager, state, 1.0)


CASES: dict[str, Callable[[CheckpointManager, dict[str, Any]], None]] = {
    case.__name__: case
    for case in (
        chosen_end,
        left_between,
        left_within,
        failed_before,
        long_end,
        stuck,
        time_for_one,
        time_for_both,
    )
}


def main() -> None:
    state: dict[str, Any] = {"w": torch.zeros(10), "batches": 0}
    grace_s = 60 if sys.argv[2].startswith("time_for") else 4
    with CheckpointManager(ROOT.as_uri(), 1000, environment=environment(grace_s)) as manager:
        manager.restore_latest(state)
        manager.save(1, state, force=True)
        CASES[sys.argv[2]](manager, state)


main()
