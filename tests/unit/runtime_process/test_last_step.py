"""Which last step the end of a training saves, and that other weights are noticed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager, PerRank, RandomState
from stepkeeper.save.request import SaveRequest
from stepkeeper.training.end_agreement import EndOfRank, judge_last_step
from stepkeeper.training.last_step import LastStep


class Training:
    """A model, an optimizer and a manager that saves every 5 steps."""

    def __init__(self, root: Path, **arguments: Any) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "tokens": torch.zeros(1),
        }
        self.manager = CheckpointManager(root, 5, chkpt_on_preemption=False, **arguments)

    def learn(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3)).sum().backward()
        self.optimizer.step()

    def run(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.learn()
            self.manager.step(step, self.state)


def steps(root: Path) -> list[int]:
    with CheckpointManager(root) as manager:
        return manager.all_steps()


def test_the_last_step_is_saved_as_it_is(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.manager:
        training.run(1, 7)
    assert steps(tmp_path) == [5, 7]
    again = Training(tmp_path)
    again.learn()
    restored = again.manager.restore_latest(again.state)
    assert restored is not None
    assert restored.step == 7
    assert torch.equal(again.model.weight, training.model.weight)
    again.manager.close()
    assert steps(tmp_path) == [5, 7]


def test_a_step_that_was_saved_is_not_saved_again(tmp_path: Path) -> None:
    with Training(tmp_path / "due").manager as manager:
        manager.step(10, {"w": torch.zeros(1)})
    with CheckpointManager(tmp_path / "due") as manager:
        assert manager.metadata(10).sequence == 1
    training = Training(tmp_path / "by hand")
    with training.manager as manager:
        training.run(1, 2)
        manager.save(2, training.state, force=True)
    assert steps(tmp_path / "by hand") == [2]


def test_an_exception_saves_nothing(tmp_path: Path) -> None:
    training = Training(tmp_path)

    def fail() -> None:
        with training.manager:
            training.run(1, 7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert steps(tmp_path) == [5]


def other_weights(training: Training) -> None:
    training.model.load_state_dict(torch.nn.Linear(3, 2).state_dict())


def other_object(training: Training) -> None:
    training.state["model"] = torch.nn.Linear(3, 2)


@pytest.mark.parametrize(
    "change",
    [Training.learn, other_weights, other_object],
    ids=lambda each: each.__name__,
)
def test_a_state_that_is_not_the_steps_any_more_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Training], None]
) -> None:
    training = Training(tmp_path)
    with training.manager:
        training.run(1, 7)
        change(training)
    assert steps(tmp_path) == [5]
    assert [each for each in caplog.messages if "step 7, the last one, isn't saved" in each]


def ends(*given: tuple[int | None, bool]) -> list[EndOfRank]:
    return [EndOfRank(step=step, changed=changed) for step, changed in given]


@pytest.mark.parametrize(
    ("said", "saves", "complaint"),
    [
        (ends((7, False)), True, None),
        (ends((7, False), (7, False)), True, None),
        (ends((None, False), (None, True)), False, None),
        (ends((7, False), (8, False)), False, "unsaved: 7, 8"),
        (ends((7, False), (None, False)), False, "unsaved: 7"),
        (ends((7, False), (7, True)), False, "step 7, the last one, isn't saved"),
    ],
)
def test_all_ranks_save_it_or_none(said: list[EndOfRank], saves: bool, complaint: str | None) -> None:
    decided, told = judge_last_step(said)
    assert decided == saves
    assert (told is None) == (complaint is None)
    assert complaint is None or complaint in str(told)


class App:
    """An object with a state, as torch's tutorials have it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Averaging:
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


Form = Callable[[Averaging], Any]


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


def by_copy(training: Averaging) -> None:
    with torch.no_grad():
        for mean, parameter in zip(training.average, training.model.parameters(), strict=True):
            parameter.copy_(mean)


def by_copy_of_data(training: Averaging) -> None:
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
    form: Form, swap: Callable[[Averaging], None]
) -> None:
    training = Averaging()
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
    training = Averaging()
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
