"""Test that the end of a training notices other weights, whatever form its state has."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager, PerRank, RandomState
from stepkeeper.save.watch.state_marks import StateMarks

State = Mapping[str, object]


class App:
    """An object with a state, as torch's tutorials have it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.models, self.optimizer = [model], optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.models[0].state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Trainer:
    """A trainer with a method that builds its state."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.seen = torch.zeros(1)

    def build(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "seen": self.seen}


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


def by_lambda(training: Training) -> Any:
    model, optimizer = training.model, training.optimizer
    return lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def by_another_function(training: Training) -> Any:
    def build(model: torch.nn.Module) -> State:
        return {"model": model.state_dict()}

    return lambda: build(training.model)


FORMS: dict[str, Callable[[Training], Any]] = {
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
    "an object of one's own": lambda training: {"app": App(training.model, training.optimizer)},
    "an object alone": lambda training: App(training.model, training.optimizer),
    "a lambda": by_lambda,
    "a lambda around a function": by_another_function,
    "a method": lambda training: Trainer(training.model, training.optimizer).build,
    "a partial": lambda training: partial(dict, app=App(training.model, training.optimizer)),
}


def by_copy(training: Training) -> None:
    with torch.no_grad():
        for mean, parameter in zip(training.average, training.model.parameters(), strict=True):
            parameter.copy_(mean)


def by_copy_of_data(training: Training) -> None:
    """Copy as most libraries of averages do: torch counts no change of the parameter."""
    for mean, parameter in zip(training.average, training.model.parameters(), strict=True):
        parameter.data.copy_(mean)


@pytest.mark.parametrize("swap", [by_copy, by_copy_of_data], ids=lambda each: each.__name__)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_average_in_the_place_of_the_weights_is_noticed(
    form: Callable[[Training], Any], swap: Callable[[Training], None]
) -> None:
    training = Training()
    training.learn()
    state = form(training)
    marks = StateMarks.of(state)
    training.evaluate()
    assert not StateMarks.of(state).differ_from(marks), "an evaluation changes nothing"
    swap(training)
    assert StateMarks.of(state).differ_from(marks)


def by_another_storage(training: Training) -> None:
    for mean, parameter in zip(training.average, training.model.parameters(), strict=True):
        parameter.data = mean


@pytest.mark.parametrize("form", ["objects", "nested", "an object of one's own", "a lambda", "a method"])
def test_another_storage_is_noticed_where_the_state_has_it_too(form: str) -> None:
    training = Training()
    training.learn()
    state = FORMS[form](training)
    marks = StateMarks.of(state)
    by_another_storage(training)
    assert StateMarks.of(state).differ_from(marks)


def test_a_model_that_was_moved_away_and_back_is_the_same() -> None:
    training = Training()
    training.learn()
    state = FORMS["nested"](training)
    marks = StateMarks.of(state)
    for parameter in training.model.parameters():
        parameter.data = parameter.data.clone()
    assert not StateMarks.of(state).differ_from(marks)


@pytest.mark.parametrize("form", FORMS)
def test_the_last_step_is_not_saved_with_an_average_for_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    training = Training()
    with CheckpointManager(tmp_path, 5, chkpt_on_preemption=False) as manager:
        for step in range(1, 8):
            training.learn()
            manager.step(step, FORMS[form](training))
        by_copy_of_data(training)
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [5]
    assert [each for each in caplog.messages if "step 7, the last one, isn't saved" in each]


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(5, 3).t(),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(1000, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(()),
        torch.ones(3, dtype=torch.bool),
    ],
    ids=["transposed", "channels last", "of many bytes", "complex", "of no dimension", "of bools"],
)
def test_weights_of_any_form_are_compared(weight: torch.Tensor) -> None:
    marks = StateMarks.of({"w": weight})
    assert not StateMarks.of({"w": weight}).differ_from(marks)
    weight.data.zero_()
    assert StateMarks.of({"w": weight}).differ_from(marks)


def test_what_a_trainer_counts_beside_its_state_is_no_change() -> None:
    training = Training()
    trainer = Trainer(training.model, training.optimizer)
    marks = StateMarks.of(trainer.build)
    trainer.seen += 1
    assert not StateMarks.of(trainer.build).differ_from(marks)


def test_a_function_that_names_nothing_is_as_it_was() -> None:
    marks = StateMarks.of(lambda: {"n": 1})
    assert not StateMarks.of(lambda: {"n": 2}).differ_from(marks)


def test_a_state_that_holds_itself_or_very_much_is_looked_at_in_part() -> None:
    state: dict[str, Any] = {f"t{number}": torch.zeros(1) for number in range(10_000)}
    state["self"] = state
    state["log"] = [{"step": number} for number in range(10_000)]
    marks = StateMarks.of(state)
    assert 4 <= len(marks.marks) <= 32
    state["t0"] += 1
    assert StateMarks.of(state).differ_from(marks)


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
    marks = StateMarks.of(state)
    assert not StateMarks.of(state).differ_from(marks)
    with torch.inference_mode():
        weights += 1
    assert StateMarks.of(state).differ_from(marks)
