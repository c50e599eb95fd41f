"""Which last step the end of a training saves, and that other weights are noticed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager, Options, PerRank, RandomState
from stepkeeper.ending.machine import EndChoice, choose_end
from stepkeeper.log import Log
from stepkeeper.save.given_state import SaveRequest
from stepkeeper.storage import open_store
from stepkeeper.training.last_step import LastStep


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


class App:
    """An object with a state, as torch's tutorials have it."""

    def __init__(self, training: Training) -> None:
        self.model, self.optimizer = training.model, training.optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


Form = Callable[[Training], Any]
Change = Callable[[Training], None]


def objects(training: Training) -> dict[str, Any]:
    return {"model": training.model, "optimizer": training.optimizer, "tokens": torch.zeros(1)}


def run(root: Path, form: Form = objects, then: Change = lambda _: None) -> Training:
    """Train for seven steps, of which the fifth is saved; do `then` at the end of the block."""
    training = Training()
    with CheckpointManager(root, save=5, options=Options(stop_on_notice=False)) as manager:
        for step in range(1, 8):
            training.learn()
            manager.step(step, form(training))
        then(training)
    return training


def steps(root: Path) -> list[int]:
    with CheckpointManager(root) as manager:
        return manager.steps()


def save(manager: CheckpointManager, *numbers: int) -> None:
    for number in numbers:
        manager.save(number, {"w": torch.full((1,), float(number))}).result()


def finish(manager: CheckpointManager, *numbers: int) -> None:
    for number in numbers:
        manager.step(number, {"w": torch.full((1,), float(number))})


@pytest.mark.parametrize(
    ("calls", "committed"),
    [
        pytest.param([(finish, 11), (save, 5)], [5, 11], id="a lower step is saved after it"),
        pytest.param([(save, 100), (finish, 1, 2)], [100, 2], id="a greater step was saved before it"),
        pytest.param([(save, 10), (finish, 10)], [10], id="it was saved before it was due"),
        pytest.param([(finish, 10), (save, 10)], [10, 10], id="it is saved again"),
        pytest.param(
            [(finish, 10), (save, 5), (finish, 10)], [10, 5, 10], id="it is due again after another"
        ),
    ],
)
def test_a_save_under_another_number_is_not_the_last_steps(
    tmp_path: Path, calls: list[Any], committed: list[int]
) -> None:
    with CheckpointManager(tmp_path, save=10, options=Options(stop_on_notice=False)) as manager:
        for call, *numbers in calls:
            call(manager, *numbers)
    commits = Log(open_store(tmp_path.as_uri())).open().commits.values()
    assert [commit.step for commit in commits] == committed


def test_a_save_that_failed_before_the_step_was_due_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    with CheckpointManager(tmp_path, save=10, options=Options(stop_on_notice=False)) as manager:
        with monkeypatch.context() as broken:
            broken.setattr("stepkeeper.save.pipeline.persist_save", fail)
            with pytest.raises(OSError, match="no room"):
                save(manager, 10)
        finish(manager, 10)
    assert steps(tmp_path) == [10]


def test_an_exception_saves_nothing(tmp_path: Path) -> None:
    def fail(_: Training) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, then=fail)
    assert steps(tmp_path) == [5]


CHANGED = "step 7, the last one, is not saved"


@pytest.mark.parametrize(
    ("said", "step", "complaint"),
    [
        ([(7, None)], 7, None),
        ([(7, None), (7, None)], 7, None),
        ([(None, None), (None, None)], None, None),
        ([(7, None), (8, None)], 7, "unsaved: 7, 8"),
        ([(7, None), (None, None)], 7, "unsaved: 7"),
        ([(None, None), (7, CHANGED)], None, "unsaved: 7"),
        ([(7, None), (7, CHANGED)], 7, CHANGED),
    ],
)
def test_all_ranks_save_it_or_none(
    said: list[tuple[int | None, str | None]], step: int | None, complaint: str | None
) -> None:
    choice = choose_end([EndChoice(step=own, stops=False, loss=loss) for own, loss in said])
    assert (choice.step, choice.stops) == (step, False)
    assert (choice.loss is None) == (complaint is None)
    assert complaint is None or complaint in str(choice.loss)


def by_copy(training: Training) -> None:
    with torch.no_grad():
        for mean, parameter in zip(training.average, training.model.parameters(), strict=True):
            parameter.copy_(mean)


def by_copy_of_data(training: Training) -> None:
    """Copy as most libraries of averages do: torch counts no change of the parameter."""
    for mean, parameter in zip(training.average, training.model.parameters(), strict=True):
        parameter.data.copy_(mean)


def by_load(training: Training) -> None:
    training.model.load_state_dict(Training().model.state_dict())


SEEN: dict[str, Form] = {
    "objects": objects,
    "a state_dict": lambda training: training.model.state_dict(),
    "state_dicts": lambda training: {"step": 3, "model": training.model.state_dict()},
    "nested": lambda training: {"epoch": 1, "random": RandomState(), "all": {"models": [training.model]}},
    "a list of tensors": lambda training: {"weights": [list(training.model.parameters())]},
    "a rank's own": lambda training: {"own": PerRank({"model": training.model})},
}


@pytest.mark.parametrize("swap", [by_copy, by_copy_of_data, by_load], ids=lambda each: each.__name__)
@pytest.mark.parametrize("form", SEEN.values(), ids=SEEN)
def test_an_average_in_the_place_of_the_weights_is_noticed(form: Form, swap: Change) -> None:
    training, last = Training(), LastStep()
    training.learn()
    last.note_finished(SaveRequest(step=1, state=form(training)))
    training.evaluate()
    assert not last.has_changed, "an evaluation changes nothing"
    swap(training)
    assert last.has_changed


@pytest.mark.parametrize(
    ("then", "is_saved"),
    [(Training.evaluate, True), (Training.learn, False), (by_copy_of_data, False)],
    ids=["an evaluation", "another step", "an average"],
)
@pytest.mark.parametrize(
    "form",
    [objects, lambda training: {"app": App(training), "step": 3}, lambda training: lambda: objects(training)],
    ids=["objects", "an object of one's own", "a function"],
)
def test_a_state_that_is_not_the_steps_any_more_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: Form, then: Change, is_saved: bool
) -> None:
    run(tmp_path, form, then)
    assert steps(tmp_path) == ([5, 7] if is_saved else [5])
    assert any("step 7, the last one, is not saved" in each for each in caplog.messages) != is_saved


def test_tensors_of_inference_mode_and_without_memory_are_no_obstacle() -> None:
    with torch.inference_mode():
        weights = torch.zeros(3)
    last = LastStep()
    others = {
        "meta": torch.zeros(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.zeros(0),
    }
    last.note_finished(SaveRequest(step=1, state={"inference": weights, **others}))
    assert not last.has_changed
    with torch.inference_mode():
        weights += 1
    assert last.has_changed


def test_a_step_whose_save_failed_is_remembered_again_with_its_changes() -> None:
    last, state = LastStep(), {"w": torch.ones(3)}
    last.note_finished(SaveRequest(step=7, state=state))
    last.follow_save(SaveRequest(step=7, state=state))
    assert last.request is None
    last.take_back()
    assert last.request is not None
    assert last.request.step == 7
    assert not last.has_changed
    state["w"].add_(1)
    assert last.has_changed
    last.note_finished(SaveRequest(step=8, state=state))
    last.take_back()
    assert last.request.step == 8
    last.forget()
    last.take_back()
    assert last.request is None
