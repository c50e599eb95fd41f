"""A trainer on CPU tensors: python trainer.py URI STEPS OPTIONS-AS-JSON. Says what it does in lines of JSON."""

import json
import logging
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stepkeeper import CheckpointManager
from stepkeeper_testing.trainer import places_in, say

URI, N_STEPS, OPTIONS = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])


def train(state: dict[str, Any], step: int) -> None:
    state["model"]["w"].mul_(1.001).add_(step)
    state["loss_sum"] += state["model"]["w"].mean()
    state["position"] = step * 7


def open_manager() -> CheckpointManager:
    if "pod" not in OPTIONS:
        return CheckpointManager(URI, save=OPTIONS["interval"])
    return CheckpointManager.from_env(_places=places_in(Path(OPTIONS["pod"])))


def terminate_a_worker() -> None:
    """Terminate a forked worker, as a data loader does."""
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    worker.terminate()
    worker.join()
    say("worker", code=worker.exitcode)


def configure_logging() -> None:
    level = logging.WARNING if OPTIONS["logging"] == "before" else logging.INFO
    logging.basicConfig(level=level, format="own %(message)s")


def main() -> None:
    torch.manual_seed(3)
    state: dict[str, Any] = {
        "model": {"w": torch.randn(300, 40)},
        "loss_sum": torch.zeros(()),
        "position": 0,
    }
    if OPTIONS.get("logging") == "before":
        configure_logging()
    with open_manager() as manager:
        if OPTIONS.get("logging") == "after":
            configure_logging()
        restored = manager.restore(state)
        first = restored.step + 1 if restored else 1
        say("start", step=first - 1, w=state["model"]["w"].sum().item(), position=state["position"])
        if OPTIONS.get("worker"):
            terminate_a_worker()
        for step in range(first, N_STEPS + 1):
            train(state, step)
            if step == OPTIONS.get("asks_at"):
                manager.request_stop()
            outcome = manager.step(step, state, {"loss": step / 2})
            say("step", step=step, stop=outcome.stop, pid=manager.health().companion_pid)
            if outcome.stop:
                break
            if OPTIONS.get("wait") and outcome.in_flight is not None:
                outcome.in_flight.result(60)
                say("committed", step=step, w=state["model"]["w"].sum().item())
            time.sleep(OPTIONS.get("pause_s", 0.0))
        say("end")


main()
