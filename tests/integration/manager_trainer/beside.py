"""A trainer with other code that minds SIGTERM: python beside.py FOLDER CASE. It trains until it is told to stop."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from stepkeeper import CheckpointManager
from stepkeeper.contract import Interval, Settings
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper_testing.pod import pod_identity

FOLDER = Path(sys.argv[1])
STATE: dict[str, Any] = {"w": torch.zeros(100), "step": 0}


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


class HandlersCompose:
    def __init__(self, handlers: list[Any]) -> None:
        self._handlers = handlers

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for handler in self._handlers:
            handler(number, frame)


class LikeLightning:
    """Do as Lightning's signal connector: be told of SIGTERM before whoever was, and end after a batch.

    lightning/pytorch/trainer/connectors/signal_connector.py (2.6.6): `register_signal_handlers`, `_HandlersCompose`,
    `SIGTERMException`, and the original handlers at the end.
    """

    def __init__(self) -> None:
        self.received_sigterm = False
        self._original = signal.getsignal(signal.SIGTERM)
        handlers: list[Any] = [self._handle]
        if self._original not in {None, signal.SIG_DFL}:
            handlers.append(self._original)
        signal.signal(signal.SIGTERM, HandlersCompose(handlers))

    def _handle(self, number: int, frame: FrameType | None) -> None:  # a handler's signature
        self.received_sigterm = True

    def after_batch(self) -> None:
        if self.received_sigterm:
            raise SystemExit

    def close(self) -> None:
        if self._original is not None:
            signal.signal(signal.SIGTERM, self._original)


class LikeTransformers:
    """Do as transformers' just-in-time checkpoints: replace the handler, and don't call the one before.

    transformers/trainer_jit_checkpoint.py: `setup_signal_handler` and `_sigterm_handler`.
    """

    def __init__(self) -> None:
        self.is_checkpoint_requested = False
        self._original = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # a handler's signature
        self.is_checkpoint_requested = True


@contextmanager
def lightning(manager: CheckpointManager) -> Iterator[Callable[[], None]]:  # each case gets it
    connector = LikeLightning()
    yield connector.after_batch
    connector.close()


@contextmanager
def transformers(manager: CheckpointManager) -> Iterator[Callable[[], None]]:  # each case gets it
    trainer = LikeTransformers()
    yield lambda: None
    assert trainer.is_checkpoint_requested


def loader(method: str) -> Callable[[CheckpointManager], AbstractContextManager[Callable[[], None]]]:
    @contextmanager
    def workers(manager: CheckpointManager) -> Iterator[Callable[[], None]]:  # each case gets it
        data = DataLoader(
            TensorDataset(torch.zeros(64, 4)),
            batch_size=1,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context=method,
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

    return workers


CASES: dict[str, Callable[[CheckpointManager], AbstractContextManager[Callable[[], None]]]] = {
    "lightning": lightning,
    "transformers": transformers,
    **{f"loader-{method}": loader(method) for method in ("fork", "spawn", "forkserver")},
}


def environment() -> Environment:
    places = PodPaths(
        settings_folder=FOLDER,
        notice_file=FOLDER / "notice",
        termination_file=FOLDER / "termination",
        token_file=FOLDER / "token",
    )
    settings = Settings(uri=(FOLDER / "root").as_uri(), interval=Interval(steps=1000))
    return Environment(identity=pod_identity(grace_s=100), settings=settings, places=places)


def train(manager: CheckpointManager, after_step: Callable[[], None]) -> None:
    manager.restore_latest(STATE)
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


def main() -> None:
    case, _, order = sys.argv[2].partition("+")
    first = contextlib.ExitStack()
    with first:
        if order == "first":
            # The other code is there before the manager is.
            after_step = first.enter_context(CASES[case](None))  # type: ignore[arg-type]  # none uses it
            with CheckpointManager((FOLDER / "root").as_uri(), 1000, environment=environment()) as manager:
                train(manager, after_step)
        else:
            with CheckpointManager((FOLDER / "root").as_uri(), 1000, environment=environment()) as manager:
                with CASES[case](manager) as after_step:
                    train(manager, after_step)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
