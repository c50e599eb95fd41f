"""Test that the end of a training notices other weights, whatever form its state has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager, PerRank, RandomState
from stepkeeper.save.request import SaveRequest
from stepkeeper.training.last_step import LastStep


class App:
    """An object with a state, as torch's tutorials have it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Training:
    """A model that learns, an average of its weights, and what an evaluation does with both."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.average = [parameter.detach().clone() for parameter in self.model.parameters()]

    def learn(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).square().sum().backward()
        self.optimizer.step()
        for mean, parameter in zip(self.average, self.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model.eval()(torch.randn(4, 3)).sum().item()
        self.model.train()


Form = Callable[[Training], Any]

SEEN: dict[str, Form] = {
    "objects": lambda training: {"model": training.model, "optimizer": training.optimizer},
    "a state_dict": lambda training: training.model.state_dict(),
    "state_dicts": lambda training: {
        "step": 3,
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
    },
    "nested": lambda training: {"epoch": 1, "random": RandomState(), "all": {"models": [training.model]}},
    "a list of tensors": lambda training: {"weights": [list(training.model.parameters())]},
    "a rank's own": lambda training: {"own": PerRank({"model": training.model})},
}
READ: dict[str, Form] = {
    "an object of one's own": lambda training: {"app": App(training.model, training.optimizer), "step": 3},
    "a function": lambda training: lambda: {"model": training.model, "optimizer": training.optimizer},
}
"""Forms whose tensors are known once they were saved."""


def by_copy(training: Training) -> None:
    with torch.no_grad():
        for mean, parameter in zip(training.average, training.model.parameters(), strict=True):
            parameter.copy_(mean)


def by_copy_of_data(training: Training) -> None:
    """Copy as most libraries of averages do: torch counts no change of the parameter."""
    for mean, parameter in zip(training.average, training.model.parameters(), strict=True):
        parameter.data.copy_(mean)


def last_step(state: Any) -> LastStep:
    last = LastStep()
    last.note_finished(SaveRequest(step=1, state=state))
    return last


@pytest.mark.parametrize("swap", [by_copy, by_copy_of_data], ids=lambda each: each.__name__)
@pytest.mark.parametrize("form", SEEN.values(), ids=SEEN)
def test_an_average_in_the_place_of_the_weights_is_noticed(
    form: Form, swap: Callable[[Training], None]
) -> None:
    training = Training()
    training.learn()
    last = last_step(form(training))
    training.evaluate()
    assert not last.has_changed, "an evaluation changes nothing"
    swap(training)
    assert last.has_changed


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("form", READ.values(), ids=READ)
def test_the_last_step_is_not_saved_with_an_average_for_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: Form, swaps: bool
) -> None:
    training = Training()
    with CheckpointManager(tmp_path, 5, chkpt_on_preemption=False) as manager:
        for step in range(1, 8):
            training.learn()
            manager.step(step, form(training))
        training.evaluate()
        if swaps:
            by_copy_of_data(training)
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == ([5] if swaps else [5, 7])
    assert any("step 7, the last one, isn't saved" in each for each in caplog.messages) == swaps


def test_weights_of_inference_mode_and_without_memory_are_no_obstacle() -> None:
    with torch.inference_mode():
        weights = torch.zeros(3)
    state = {
        "inference": weights,
        "meta": torch.zeros(3, device="meta"),
        "sparse": torch.zeros(3, 3).to_sparse(),
        "empty": torch.zeros(0, 3),
        "lazy": torch.nn.LazyLinear(3),
    }
    last = last_step(state)
    assert not last.has_changed
    with torch.inference_mode():
        weights += 1
    assert last.has_changed
