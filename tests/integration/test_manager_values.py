"""Values that change their shape, and random numbers, through a manager: what a restart has of them."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepkeeper import CheckpointManager, RandomState, Whole


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def open_manager(uri: str, interval: int = 1) -> CheckpointManager:
    return CheckpointManager(uri, interval, chkpt_on_preemption=False)


@dataclasses.dataclass
class TrainerState:
    """As that of Hugging Face's Trainer."""

    global_step: int = 0
    epoch: float = 0.0
    log_history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    best_metric: float | None = None
    stateful_callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)


def train(trainer: TrainerState, step: int) -> None:
    trainer.global_step = step
    trainer.log_history.append({"loss": 1 / step, "eval.loss": 2 / step, "step": step})
    trainer.best_metric = 1 / step
    trainer.stateful_callbacks.setdefault("Stopping", {"attributes": {}})["attributes"][f"at {step}"] = step


@pytest.mark.parametrize("whole", [True, False], ids=["as a Whole", "as it is"])
def test_the_state_of_a_trainer_goes_on_after_a_restart(uri: str, *, whole: bool) -> None:
    trainer = TrainerState()
    for started_at in (0, 4, 8):
        found = TrainerState()
        given: Any = dataclasses.asdict(found)
        state = {"w": torch.zeros(2), "trainer": Whole(given) if whole else given}
        with open_manager(uri, 4) as manager:
            restored = manager.restore_latest(state)
            assert (restored.step if restored else 0) == started_at
            assert given == dataclasses.asdict(trainer)
            for step in range(started_at + 1, started_at + 5):
                train(trainer, step)
                now = dataclasses.asdict(trainer)
                manager.step(step, {"w": torch.zeros(2), "trainer": Whole(now) if whole else now})


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),  # noqa: NPY002  # the global generator is what is tested
        float(torch.randn(())),
        float(torch.nn.functional.dropout(torch.ones(64)).sum()),
    ]


def train_with_noise(uri: str, n_steps: int) -> list[list[float]]:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    state = {"random": RandomState(), "model": model}
    drawn = []
    with open_manager(uri, 5) as manager:
        restored = manager.restore_latest(state)
        for step in range(restored.step + 1 if restored else 1, n_steps + 1):
            noise = draw()
            with torch.no_grad():
                model.weight += noise[3]
            drawn.append([*noise, float(model.weight.detach().sum())])
            manager.step(step, state)
    return drawn


@pytest.mark.smoke
def test_random_numbers_go_on_bit_for_bit_after_a_restart(uri: str) -> None:
    whole = train_with_noise(f"{uri}-undisturbed", 20)
    assert train_with_noise(uri, 7) == whole[:7]
    # Step 7 wasn't due; it was saved as the last one.
    assert train_with_noise(uri, 20) == whole[7:]
    assert json.loads(json.dumps(whole)) == whole, "compared bit for bit"
