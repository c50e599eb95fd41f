"""One of several ranks that says what it does: python told_anywhere.py FOLDER RANK WORLD_SIZE OPTIONS-AS-JSON.

Each part of a run is a span of a tenth of a second at least, as it is with a bucket instead of a local disk: the tests
send SIGTERM in one of them. At its end the rank says which spans it was in when the signal came. The span `stays_in`
lasts until it has come.
"""

import functools
import hashlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stepkeeper import CheckpointManager
from stepkeeper.contract import Interval, Settings
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.save import persist
from stepkeeper.save.share import write_share
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper_testing.pod import pod_identity

T = TypeVar("T")
FOLDER, RANK, WORLD_SIZE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
OPTIONS = json.loads(sys.argv[4])
SPANS: list[tuple[str, float, float]] = []
"""Name, begin and end of each, by time.monotonic()."""

SLOW_S = 0.1
SAYING = threading.Lock()
CHANCE = random.Random(f"{OPTIONS['seed']}-{RANK}")
PATIENCE_S = 60.0
MANAGERS: list[CheckpointManager] = []
"""The one of this rank."""


def say(event: str, **values: Any) -> None:
    with SAYING:
        print(json.dumps({"event": event, **values}), flush=True)


@contextmanager
def span(name: str) -> Iterator[None]:
    say("in", name=name)
    began_s = time.monotonic()
    try:
        yield
        if name == OPTIONS.get("stays_in"):
            ends_s = time.monotonic() + PATIENCE_S
            while not told_s() and time.monotonic() < ends_s:
                time.sleep(0.005)
    finally:
        SPANS.append((name, began_s, time.monotonic()))


def told_s() -> list[float]:
    """Return when SIGTERM came, by time.monotonic(), if it came to this rank."""
    (manager,) = MANAGERS
    notices = manager._parts.controller.notices.notices
    return [notice.monotonic_s for notice in notices if notice.source == "sigterm"]


def slowed(name: str, call: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> T:
        with span(name):
            time.sleep(CHANCE.uniform(0.5, 1.0) * SLOW_S)
            return call(*args, **kwargs)

    return wrapped


def slow_saves_down() -> None:
    """Make spans of the parts of a save, which runs in a thread of its own."""
    persist.write_share = slowed("transfer", write_share)  # type: ignore[attr-defined]  # the name that is called
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


def new_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    weight = torch.rand(64, 64, generator=generator)
    return {"weight": weight, "momentum": torch.zeros(64, 64), "step": 0}


def update(weight: torch.Tensor, momentum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    momentum = momentum * 0.9 + torch.sin(weight * 3.0)
    return weight - momentum * 0.01, momentum


def advance(state: dict[str, Any], step: int, function: Callable[..., Any] = update) -> None:
    state["weight"], state["momentum"] = function(state["weight"], state["momentum"])
    state["step"] = step


def digest(state: dict[str, Any]) -> str:
    data = state["weight"].numpy().tobytes() + state["momentum"].numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def environment() -> Environment:
    places = PodPaths(
        settings_folder=FOLDER,
        notice_file=FOLDER / f"notice.{RANK}",
        termination_file=FOLDER / f"termination.{RANK}",
        token_file=FOLDER / "token",
    )
    settings = Settings(uri=(FOLDER.parent / "root").as_uri(), interval=Interval(steps=4))
    return Environment(identity=pod_identity(grace_s=120), settings=settings, places=places)


def tell_spans() -> None:
    """Say which spans this rank was in when SIGTERM came, if it came to this rank."""
    names = sorted(
        {name for name, began_s, ended_s in SPANS for came_s in told_s() if began_s <= came_s <= ended_s}
    )
    say("told", names=names)


def train(manager: CheckpointManager) -> None:
    state = new_state()
    with span("restore"):
        restored = manager.restore_latest(state)
    first = restored.step + 1 if restored else 1
    say("start", step=first - 1, digest=digest(state), held=state["step"])
    with span("before the first step"):
        time.sleep(CHANCE.uniform(0.5, 1.0) * SLOW_S)
    with span("compile"):
        function = torch.compile(update, backend="eager")
        function(torch.zeros(64, 64), torch.zeros(64, 64))
    for step in range(first, first + OPTIONS["steps"]):
        advance(state, step)
        if manager.step(step, state).stop:
            say("stops", step=step)
            return
        time.sleep(0.03)
    with span("after the last step"):
        time.sleep(CHANCE.uniform(0.5, 1.0) * SLOW_S)
        manager.wait()


def main() -> None:
    if WORLD_SIZE > 1:
        dist.init_process_group(
            "gloo",
            init_method=(FOLDER / "ranks").as_uri(),
            rank=RANK,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=120),
        )
    slow_saves_down()
    manager = CheckpointManager((FOLDER.parent / "root").as_uri(), 4, environment=environment())
    MANAGERS.append(manager)
    try:
        with manager:
            train(manager)
    finally:
        tell_spans()


if __name__ == "__main__":
    main()
