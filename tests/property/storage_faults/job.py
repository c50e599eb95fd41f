"""A training that saves every step, told step by step what to do, in lines of JSON."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stepkeeper import CheckpointManager, Options
from stepkeeper.errors import StepkeeperError


class Job:
    """Every method answers with what JSON can hold."""

    def __init__(self) -> None:
        self._manager: CheckpointManager | None = None

    def open(self, uri: str) -> dict[str, Any]:
        """The root is claimed by a new manager; or why it isn't."""
        manager = CheckpointManager(uri, save=1, options=Options(stop_on_notice=False))
        try:
            restored = manager.restore(_state(0))
        except StepkeeperError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        self._manager = manager
        return {"step": None if restored is None else restored.step}

    def save(self, step: int) -> dict[str, Any]:
        """Save, and return what the call raised or what became of the save, and how health() reports that."""
        manager = self._manager
        assert manager is not None
        try:
            begun = manager.step(step, _state(step)).in_flight
        except StepkeeperError as error:
            return {"raised": f"{type(error).__name__}: {error}"}
        assert begun is not None
        while not begun.done:
            time.sleep(0.005)
        health = manager.health()
        return {"committed": health.committed_step, "health": health.error, "ok": health.ok}

    def check(self, steps: list[int]) -> dict[str, Any]:
        """Return which of these can be restored and are what was saved, element by element."""
        assert self._manager is not None
        right = []
        for step in steps:
            state = _state(0)
            self._manager.restore(state, step)
            if torch.equal(state["w"], _state(step)["w"]) and state["step"] == step:
                right.append(step)
        return {"right": right}

    def close(self) -> dict[str, Any]:
        assert self._manager is not None
        self._manager.close()
        return {}


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((400, 40), float(step)) + torch.arange(40), "step": step}


def main() -> None:
    # Companions give a store up after a second or two.
    path = [str(Path(__file__).parent / "in_companion"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    job = Job()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(job, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
