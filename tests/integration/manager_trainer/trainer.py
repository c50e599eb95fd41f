"""A trainer on CPU tensors: python trainer.py URI STEPS OPTIONS-AS-JSON. Says what it does in lines of JSON."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stepkeeper import CheckpointManager
from stepkeeper.training.environment import PodPaths


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def new_state() -> dict[str, Any]:
    torch.manual_seed(3)
    return {"model": {"w": torch.randn(300, 40)}, "loss_sum": torch.zeros(()), "position": 0}


def train(state: dict[str, Any], step: int) -> None:
    state["model"]["w"].mul_(1.001).add_(step)
    state["loss_sum"] += state["model"]["w"].mean()
    state["position"] = step * 7


def open_manager(uri: str, options: dict[str, Any]) -> CheckpointManager:
    if "pod" not in options:
        return CheckpointManager(uri, options["interval"])
    pod = Path(options["pod"])
    places = PodPaths(
        settings_folder=pod,
        notice_file=pod / "notice",
        termination_file=pod / "termination",
        token_file=pod / "token",
    )
    return CheckpointManager.from_env(places=places)


def terminate_a_worker() -> None:
    """Terminate a forked worker, as a data loader does."""
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    worker.terminate()
    worker.join()
    say("worker", code=worker.exitcode)


def be_told_while_it_ends(manager: CheckpointManager) -> None:
    """Get SIGTERM when the last word is written, and go on when the manager has heard of it."""
    parts = manager._parts
    announce_leave = parts.rank_group.announce_leave

    def announce_and_be_told(error: BaseException | None, timeout_s: float) -> None:
        announce_leave(error, timeout_s)
        os.kill(os.getpid(), signal.SIGTERM)
        while parts.controller.notices.read_notice() is None:
            time.sleep(0.01)

    parts.rank_group.announce_leave = announce_and_be_told  # type: ignore[method-assign]  # the moment of the signal


def main() -> None:
    uri, n_steps, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    state = new_state()
    with open_manager(uri, options) as manager:
        restored = manager.restore_latest(state)
        first = restored.step + 1 if restored else 1
        say("start", step=first - 1, w=state["model"]["w"].sum().item(), position=state["position"])
        if options.get("worker"):
            terminate_a_worker()
        if options.get("told_at_end"):
            be_told_while_it_ends(manager)
        for step in range(first, n_steps + 1):
            train(state, step)
            if step == options.get("raise_at"):
                raise ValueError("the loss is no number")
            outcome = manager.step(step, state, {"loss": step / 2})
            say("step", step=step, stop=outcome.stop, pid=manager.health().companion_pid)
            if outcome.stop:
                break
            if options.get("wait") and outcome.in_flight is not None:
                outcome.in_flight.result(60)
                say("committed", step=step, w=state["model"]["w"].sum().item())
            time.sleep(options.get("pause_s", 0.0))
        say("end")


main()
