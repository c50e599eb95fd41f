"""One of several ranks that says where it is: python told_anywhere.py FOLDER RANK WORLD_SIZE OPTIONS-AS-JSON.

Each part of a run takes a tenth of a second at least, as it does with a bucket: the test sends SIGTERM in one of them.
The part `stays_in` lasts until it has come.
"""

import functools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from stepkeeper import CheckpointManager
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.save import persist
from stepkeeper_testing.trainer import in_pod, join, say, slow_shares

T = TypeVar("T")
FOLDER, RANK, WORLD_SIZE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
OPTIONS = json.loads(sys.argv[4])
ROOT = FOLDER.parent / "root"
CHANCE = random.Random(f"{OPTIONS['seed']}-{RANK}")
PATIENCE_S = 60.0
MANAGERS: list[CheckpointManager] = []
"""The one of this rank."""


@contextmanager
def part(name: str) -> Iterator[None]:
    say("in", name=name)
    time.sleep(CHANCE.uniform(0.05, 0.1))
    yield
    ends_s = time.monotonic() + PATIENCE_S
    while name == OPTIONS.get("stays_in") and not is_told() and time.monotonic() < ends_s:
        time.sleep(0.005)


def is_told() -> bool:
    notices = MANAGERS[0]._parts.ending.notices.schedule.notices
    return any(notice.source == "sigterm" for notice in notices)


def slowed(name: str, call: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> T:
        with part(name):
            return call(*args, **kwargs)

    return wrapped


def slow_saves_down() -> None:
    slow_shares(lambda write, *args, **kwargs: slowed("transfer", write)(*args, **kwargs))
    persist._request_commit = slowed("commit", persist._request_commit)
    gather, broadcast = StoreRankGroup.gather, StoreRankGroup.broadcast
    slow_gather, slow_broadcast = slowed("vote", gather), slowed("commit", broadcast)

    def gather_votes(group: StoreRankGroup, name: str, *args: Any) -> list[dict[str, Any]]:
        return (slow_gather if name.endswith("/vote") else gather)(group, name, *args)

    def await_outcome(group: StoreRankGroup, name: str, *args: Any) -> dict[str, Any]:
        waits = name.endswith("/outcome") and RANK > 0
        return (slow_broadcast if waits else broadcast)(group, name, *args)

    StoreRankGroup.gather = gather_votes  # type: ignore[assignment, method-assign]  # the moment is what is tested
    StoreRankGroup.broadcast = await_outcome  # type: ignore[assignment, method-assign]  # the moment is what is tested


def train(manager: CheckpointManager) -> None:
    state: dict[str, Any] = {"weight": torch.zeros(64, 64), "step": 0}
    with part("restore"):
        restored = manager.restore(state)
    done = restored.step if restored else 0
    least, most = state["weight"].min().item(), state["weight"].max().item()
    say("start", step=done, held=[state["step"], least, most])
    with part("before the first step"):
        pass
    with part("compile"):
        compiled = torch.compile(lambda weight: weight + 1, backend="eager")
        compiled(torch.zeros(64, 64))
    for step in range(done + 1, done + 1 + OPTIONS["steps"]):
        state["weight"], state["step"] = compiled(state["weight"]), step
        if manager.step(step, state).stop:
            say("stops", step=step)
            return
        time.sleep(0.03)
    with part("after the last step"):
        manager.wait()


def main() -> None:
    if WORLD_SIZE > 1:
        join(RANK, WORLD_SIZE, FOLDER)
    slow_saves_down()
    MANAGERS.append(in_pod(FOLDER, RANK, root=ROOT, steps=4, grace_s=120))
    with MANAGERS[0] as manager:
        train(manager)


main()
