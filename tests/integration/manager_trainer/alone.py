"""A trainer of one process that is told to stop, or fenced, in a case of its own: python alone.py FOLDER CASE."""

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from stepkeeper import CheckpointManager
from stepkeeper.errors import FencedError
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.pod import pod_identity
from stepkeeper_testing.trainer import in_pod, say

FOLDER = Path(sys.argv[1])
URI = (FOLDER / "root").as_uri()
STATE: dict[str, Any] = {"w": torch.zeros(100), "step": 0}


# Told to stop while something else is wrong


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


def be_told(manager: CheckpointManager) -> None:
    atexit.register(left, time.monotonic(), delays_s())
    os.kill(os.getpid(), signal.SIGTERM)
    while manager.health().notice is None:
        time.sleep(0.01)


def stop_from(first: int, manager: CheckpointManager) -> None:
    """Train until `step` says stop: the thread that hears of the notice asks for that a moment after it is known."""
    assert any(manager.step(step, STATE).stop for step in range(first, 1000))


def own_handler_in_a_save(manager: CheckpointManager) -> None:
    manager.save(2, STATE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    be_told(manager)


def own_handler_in_a_step(manager: CheckpointManager) -> None:
    assert not manager.step(2, STATE).stop
    STATE["step"] += 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    be_told(manager)


def stuck(manager: CheckpointManager) -> None:
    pid = manager.health().companion_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    be_told(manager)
    stop_from(2, manager)


class LongEnd:
    """Takes its time when the interpreter is taken down, as a library may."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(20)


def long_end(manager: CheckpointManager) -> None:
    json.kept = LongEnd()  # type: ignore[attr-defined]  # a module's values go when no thread of Python runs any more
    be_told(manager)
    stop_from(2, manager)


def told(case: Callable[[CheckpointManager], None]) -> None:
    with in_pod(FOLDER, grace_s=4) as manager:
        manager.restore(STATE)
        manager.save(1, STATE).result()
        case(manager)


# Beside other code that minds SIGTERM


@contextmanager
def lightning() -> Iterator[Callable[[], None]]:
    """Do as Lightning's signal connector: be told of SIGTERM before the handler that was there, end after a batch.

    lightning/pytorch/trainer/connectors/signal_connector.py (2.6.6): `register_signal_handlers`, `_HandlersCompose`,
    `SIGTERMException`, and the original handlers at the end.
    """
    original, received = signal.getsignal(signal.SIGTERM), []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if callable(original):
            original(number, frame)

    def after_batch() -> None:
        if received:
            raise SystemExit

    signal.signal(signal.SIGTERM, handle)
    yield after_batch
    signal.signal(signal.SIGTERM, original)


@contextmanager
def transformers() -> Iterator[Callable[[], None]]:
    """Do as transformers' just-in-time checkpoints: replace the handler, and don't call the one before.

    transformers/trainer_jit_checkpoint.py: `setup_signal_handler` and `_sigterm_handler`.
    """
    requested: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: requested.append(number))
    yield lambda: None
    assert requested


@contextmanager
def loader() -> Iterator[Callable[[], None]]:
    data = DataLoader(
        TensorDataset(torch.zeros(64, 4)),
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    batches: Iterator[Any] = iter(data)
    next(batches)
    say("workers", pids=[worker.pid for worker in batches._workers])  # type: ignore[attr-defined]  # of torch

    def take() -> None:
        nonlocal batches
        try:
            next(batches)
        except StopIteration:
            batches = iter(data)

    yield take


def beside(other: Any, *, is_first: bool = False) -> None:
    def train(manager: CheckpointManager, after_step: Callable[[], None]) -> None:
        manager.restore(STATE)
        for step in range(1, 10**6):
            STATE["w"] += 1
            STATE["step"] = step
            if manager.step(step, STATE).stop:
                say("stops", step=step)
                return
            try:
                after_step()
            except SystemExit:
                say("stops", step=step)
                raise
            if step == 20:
                say("trains")
            time.sleep(0.02)

    if is_first:
        with other() as after_step, in_pod(FOLDER, grace_s=100) as manager:
            train(manager, after_step)
    else:
        with in_pod(FOLDER, grace_s=100) as manager, other() as after_step:
            train(manager, after_step)


# Fenced outside of a manager's block


def forgive(manager: CheckpointManager) -> None:
    with suppress(FencedError):
        manager.save(2, STATE).result()


def fail_later(manager: CheckpointManager) -> None:
    forgive(manager)
    raise ValueError("the loss is no number")


def choose_an_end(manager: CheckpointManager) -> None:
    forgive(manager)
    sys.exit(0)


WAYS: dict[str, Callable[[CheckpointManager], object]] = {
    "save": lambda manager: manager.save(2, STATE).result(),
    "close": lambda manager: (manager.save(2, STATE), manager.close()),
    "restore": lambda manager: manager.restore(STATE),
    "fail_later": fail_later,
    "forgive": forgive,
    "choose_an_end": choose_an_end,
    "ask_nothing": lambda manager: manager.save(2, STATE),
    "drop": lambda manager: manager.save(2, STATE),
}


def lose_root(manager: CheckpointManager, way: str) -> CheckpointManager:
    manager.save(1, STATE).result()
    Log(open_store(URI)).begin(pod_identity(restart_attempt=3), host="node-7")
    WAYS[way](manager)
    return manager


def fenced(way: str, *, by_hand: bool = False) -> None:
    kept = lose_root(CheckpointManager(URI, save=10**6) if by_hand else in_pod(FOLDER), way)
    if way != "drop":
        globals()["kept"] = kept


CASES: dict[str, Callable[[], None]] = {
    **{
        case.__name__: partial(told, case)
        for case in (own_handler_in_a_save, own_handler_in_a_step, stuck, long_end)
    },
    **{other.__name__: partial(beside, other) for other in (lightning, transformers)},
    "lightning+first": partial(beside, lightning, is_first=True),
    "loader-spawn": partial(beside, loader),
    **{f"fenced-{way}": partial(fenced, way) for way in WAYS},
    **{f"fenced-{way}-by_hand": partial(fenced, way, by_hand=True) for way in WAYS},
}

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    CASES[sys.argv[2]]()
