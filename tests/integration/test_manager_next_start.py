"""Test that a save tells what the next start's restore will refuse, and nothing else."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepkeeper import CheckpointManager, PerRank, Whole
from stepkeeper_planners.errors import LoadMismatchError

State = dict[str, Any]


class Loader:
    """Has another state after its first batch."""

    entries: dict[str, Any] = {"position": 0}  # noqa: RUF012 — replaced, not changed

    def state_dict(self) -> dict[str, Any]:
        return dict(self.entries)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = state


def put(**entries: Any) -> Callable[[State], None]:
    return lambda state: state.update(entries)


def advance(state: State) -> None:
    state["loader"].entries = {"position": 5, "seed": 1}


def tie(state: State) -> None:
    state["b"] = state["a"]


CASES: dict[str, tuple[Callable[[], State], Callable[[State], None], str | None]] = {
    "other values": (lambda: {"n": 0, "w": torch.zeros(2)}, put(n=1), None),
    "None, then a number": (lambda: {"best": None}, put(best=0.5), None),
    "None, then text": (lambda: {"best": None}, put(best="model.pt"), None),
    "an int, then an array": (lambda: {"best": 0}, put(best=np.zeros(3)), None),
    "None, then a tensor": (lambda: {"best": None}, put(best=torch.ones(2)), r"best: a tensor .* plain value"),
    "a tensor, then None": (lambda: {"best": torch.ones(2)}, put(best=None), r"best: a plain value .* tensor"),
    "a tensor of another shape": (
        lambda: {"seen": torch.zeros(2)},
        put(seen=torch.zeros(5)),
        r"seen: shape \(5,\) .* \(2,\)",
    ),
    "a tensor of another dtype": (
        lambda: {"seen": torch.zeros(2)},
        put(seen=torch.zeros(2, dtype=torch.float64)),
        "seen: dtype float64",
    ),
    "a list that gets numbers": (lambda: {"log": []}, put(log=[1, 2, 3]), None),
    "a list that gets dicts": (lambda: {"log": []}, put(log=[{"loss": 1.0}, {"loss": 2.0, "lr": 1}]), None),
    "a list that gets tensors": (lambda: {"log": []}, put(log=[torch.ones(1)]), r"new: log\.0"),
    "a list that gets dicts with tensors": (lambda: {"log": []}, put(log=[{"w": torch.ones(1)}]), r"log\.0\.w"),
    "a list of dicts that becomes empty": (lambda: {"log": [{"n": 1}]}, put(log=[]), None),
    "a list whose dicts get keys": (lambda: {"log": [{"n": 1}]}, put(log=[{"n": 1, "m": 2}]), r"new: log\.0\.m"),
    "an empty dict that gets keys": (lambda: {"seen": {}}, put(seen={"a": 1, "b": {"c": 2}}), None),
    "an empty dict that gets a tensor": (lambda: {"seen": {}}, put(seen={"a": torch.ones(1)}), r"new: seen\.a"),
    "a dict that gets keys": (lambda: {"seen": {"a": 1}}, put(seen={"a": 1, "b": 2}), r"new: seen\.b"),
    "a dict, then None": (lambda: {"best": {"step": 1}}, put(best=None), "best"),
    "None, then a dict": (lambda: {"best": None}, put(best={"step": 1}), None),
    "a list, then a number": (lambda: {"log": [{"n": 1}]}, put(log=5), None),
    "what is tied later": (lambda: {"a": torch.zeros(2), "b": torch.zeros(2)}, tie, None),
    "what isn't tied any more": (
        lambda: dict.fromkeys(("a", "b"), torch.zeros(2)),
        put(b=torch.ones(2)),
        r"b: one tensor .* several|a: one tensor .* several",
    ),
    "an object with other entries": (lambda: {"loader": Loader()}, advance, r"new: loader\.seed"),
    "another object in a PerRank": (lambda: {"loader": PerRank(Loader())}, lambda state: None, None),
    "one for all, then each rank's own": (lambda: {"n": 1}, put(n=PerRank(1)), r"n: each rank's own"),
    "anything in a Whole": (
        lambda: {"t": Whole({"best": None, "log": []})},
        put(t=Whole({"best": torch.ones(2), "log": [{"w": torch.ones(1)}]})),
        None,
    ),
}  # fmt: skip


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("stepkeeper.save") and record.levelno == logging.WARNING
    ]


@pytest.mark.parametrize("restores", ["a first start", "a restored one"])
@pytest.mark.parametrize(("start", "change", "said"), CASES.values(), ids=CASES)
def test_a_save_tells_what_the_next_start_refuses(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    start: Callable[[], State],
    change: Callable[[State], None],
    said: str | None,
    restores: str,
) -> None:
    step = 0
    if restores == "a restored one":
        step = 1
        with CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
            manager.step(1, start() | {"anchor": torch.ones(1)})
    state = start() | {"anchor": torch.ones(1)}
    with CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
        assert (manager.restore_latest(state) is None) == (step == 0)
        manager.step(step + 1, state)
        assert told(caplog) == []
        change(state)
        manager.step(step + 2, state)
        manager.step(step + 3, state)
    messages = told(caplog)
    if said is None:
        assert messages == []
    else:
        (message,) = messages
        assert re.search(said, message), message
        assert message.startswith(f"step {step + 2} is saved with other ")
    again = start() | {"anchor": torch.ones(1)}
    with CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
        if said is None:
            restored = manager.restore_latest(again)
            assert restored is not None
            assert restored.step == step + 3
        else:
            with pytest.raises(LoadMismatchError):
                manager.restore_latest(again)
