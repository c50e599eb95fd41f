"""What a save tells of a state that the next start would be surprised by: stale values, and names that have changed."""

import logging
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager, PerRank, RandomState, Whole, prime_optimizer


@pytest.fixture(name="manager")
def _manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager((tmp_path / "root").as_uri(), 1, chkpt_on_preemption=False) as manager:
        yield manager


def told(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("stepkeeper.save") and record.levelno == level
    ]


STALE: dict[str, tuple[Any, str]] = {
    "a step": (
        {"w": 1.5, "step": 0},
        r"^step = 0 in the state didn't change in the saves of step 1 to 3,.*lambda.*w = 1.5",
    ),
    "a deep one": ({"trainer": {"global_step": 7, "lr": 0.1}}, r"^trainer\.global_step = 7 in the state"),
    "tokens": ({"consumed_tokens": 0.0}, "consumed_tokens"),
    "updates": ({"updates": 0}, "^updates = 0 in the state"),
    "one in a Whole": ({"t": Whole({"iteration": 3})}, r"t\.iteration"),
    "a rank's own": ({"t": PerRank({"samples_seen": 3})}, r"t\.samples_seen"),
    "a generator of Python": ({"python_rng": random.getstate()}, r"python_rng .* RandomState\(\)"),
    "a generator of torch": (
        {"rng": PerRank({"torch": torch.get_rng_state()})},
        r"rng\.torch .* RandomState",
    ),
    "two": (
        {"step": 0, "rng_state": torch.get_rng_state()},
        "step = 0 in the state .* rng_state in the state is",
    ),
}


@pytest.mark.parametrize(("state", "said"), STALE.values(), ids=STALE)
def test_a_stale_value_is_told_once(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture, state: Any, said: str
) -> None:
    for step in range(1, 3):
        manager.step(step, state)
    assert not told(caplog)
    for step in range(3, 9):
        manager.step(step, state)
    (message,) = told(caplog)
    assert re.search(said, message, re.DOTALL), message


def test_settings_and_what_is_kept_up_to_date_are_not_told(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    prime_optimizer(optimizer)
    constants = {
        "lr": 0.1, "seed": 3, "n_steps": 100, "steps": 100, "total_steps": 100, "warmup_steps": 10, "epoch": 0,
        "step_size": 5, "rng_seed": 4, "batch_size": 8, "resumed": False, "name": "step",
    }  # fmt: skip
    in_place = torch.get_rng_state()
    raw = {"state": {0: {"step": 5}, 1: {"step": 0}}}
    log = [{"step": 1, "eval": {"step": 1}}]
    for step in range(1, 8):
        in_place.copy_(torch.get_rng_state())
        manager.step(
            step,
            {
                "model": model,
                "optimizer": optimizer,
                "raw": raw,
                "log": log,
                "whole": Whole({"log": log}),
                "args": constants,
                "step": step,
                "python_rng": random.getstate(),
                "torch_rng": in_place,
                "random": RandomState(),
                "iter": PerRank({"iteration": step}),
            },
        )
    # The same step saved again and again is no news.
    for _ in range(5):
        manager.save(8, {"step": 8, "args": constants}, force=True)
    assert [message for message in told(caplog) if "saved with other names" not in message] == []


def test_an_optimizer_that_was_not_primed_is_told_at_the_first_save(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    manager.restore_latest(state)
    for step in range(1, 4):
        model(torch.ones(2)).sum().backward()
        state["optimizer"].step()  # type: ignore[attr-defined]
        manager.step(step, state)
    (message,) = told(caplog)
    assert message.startswith("step 1 is saved with other names")
    assert "optimizer.state.0.exp_avg" in message
    assert "prime_optimizer(optimizer) before restore_latest" in message


def test_a_dict_that_gets_keys_is_told_at_the_save_and_not_in_a_whole(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    best: dict[str, float] = {"loss": 1.0}
    seen: dict[str, float] = {"loss": 1.0}
    manager.restore_latest({"n": 0, "best": best, "seen": Whole(seen)})
    manager.step(1, {"n": 1, "best": best, "seen": Whole(seen)})
    assert not told(caplog)
    best["accuracy"] = seen["accuracy"] = 0.5
    manager.step(2, {"n": 2, "best": best, "seen": Whole(seen)})
    (message,) = told(caplog)
    assert "new: best.accuracy." in message
    assert "seen" not in message
    assert "Whole(...)" in message


def test_names_that_are_gone_are_told(manager: CheckpointManager, caplog: pytest.LogCaptureFixture) -> None:
    manager.step(1, {"n": 1, "ema": torch.ones(2)})
    manager.step(2, {"n": 2})
    (message,) = told(caplog)
    assert "gone: ema." in message


def test_lists_that_grow_are_no_surprise_and_their_cost_is_told_once(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="stepkeeper")
    state: dict[str, Any] = {"n": 0, "history": [], "seen": {}}
    manager.restore_latest(state)
    for step in range(1, 9):
        state["history"].append({"loss": step})
        state["seen"][f"at {step}"] = step
        state["n"] = step
        manager.step(step, state)
    assert not told(caplog)
    (cost,) = [message for message in told(caplog, logging.INFO) if "Whole" in message]
    assert "item by item" in cost


def test_a_state_that_cannot_be_read_at_the_start_is_told(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    class Late:
        ready = False

        def state_dict(self) -> dict[str, Any]:
            if not self.ready:
                raise RuntimeError("no iterator yet")
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    late = Late()
    assert manager.restore_latest({"loader": late}) is None
    (message,) = told(caplog)
    assert "no iterator yet" in message
    late.ready = True
    manager.step(1, {"loader": late})
    assert manager.wait()


def test_a_part_that_is_restored_says_nothing_of_the_names(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    manager.save(1, {"model": {"w": torch.ones(1)}, "n": 1})
    manager.restore_latest({"model": {"w": torch.ones(1)}}, items=["model"])
    manager.save(2, {"model": {"w": torch.ones(1)}, "n": 2})
    assert not told(caplog)
