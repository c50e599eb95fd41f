"""Lose the root to another claim outside of a manager's block: python fenced.py URI POD|- WAY."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from stepkeeper import CheckpointManager
from stepkeeper.errors import FencedError
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper.training.environment import PodPaths
from stepkeeper_testing.pod import pod_identity

STATE: Final = {"w": torch.zeros(4)}


def open_manager(uri: str, pod: str) -> CheckpointManager:
    if pod == "-":
        return CheckpointManager(uri, 1)
    folder = Path(pod)
    return CheckpointManager.from_env(
        places=PodPaths(
            settings_folder=folder,
            notice_file=folder / "notice",
            termination_file=folder / "termination",
            token_file=folder / "token",
        )
    )


def await_result(manager: CheckpointManager) -> None:
    in_flight = manager.step(2, STATE).in_flight
    assert in_flight is not None
    in_flight.result()


def fail_later(manager: CheckpointManager) -> None:
    with suppress(FencedError):
        manager.save(2, STATE)
    raise ValueError("the loss is no number")


def forgive(manager: CheckpointManager) -> None:
    with suppress(FencedError):
        manager.save(2, STATE)


def forgive_and_close(manager: CheckpointManager) -> None:
    forgive(manager)
    manager.close()


def choose_an_end(manager: CheckpointManager) -> None:
    forgive(manager)
    sys.exit(0)


def after_a_save(call: Callable[[CheckpointManager], object]) -> Callable[[CheckpointManager], object]:
    def lose(manager: CheckpointManager) -> None:
        manager.save_async(2, STATE)
        call(manager)

    return lose


WAYS: Final[dict[str, Callable[[CheckpointManager], object]]] = {
    "save": lambda manager: manager.save(2, STATE),
    "result": await_result,
    "wait": after_a_save(lambda manager: manager.wait()),
    "join": after_a_save(lambda manager: manager.join()),
    "close": after_a_save(lambda manager: manager.close()),
    "restore_latest": lambda manager: manager.restore_latest(STATE),
    "restore": lambda manager: manager.restore(1, STATE),
    "fail_later": fail_later,
    "forgive": forgive,
    "forgive_and_close": forgive_and_close,
    "choose_an_end": choose_an_end,
    "ask_nothing": after_a_save(lambda _: None),
    "drop": after_a_save(lambda _: None),
}


def lose_root(uri: str, pod: str, way: str) -> CheckpointManager:
    manager = open_manager(uri, pod)
    manager.save(1, STATE)
    Log(open_store(uri)).begin(pod_identity(restart_attempt=3), host="node-7")
    WAYS[way](manager)
    return manager


if __name__ == "__main__":
    kept = lose_root(*sys.argv[1:])
    if sys.argv[-1] == "drop":
        del kept
