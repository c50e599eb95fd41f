"""Test which last step the end of a training saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager
from stepkeeper.training.end_agreement import EndOfRank, judge_last_step


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


def test_the_total_steps_are_saved_when_they_are_finished(tmp_path: Path) -> None:
    training = Training(tmp_path, total_steps=7)
    for step in range(1, 8):
        training.learn()
        outcome = training.manager.step(step, training.state)
        assert (outcome.in_flight is not None) == (step in (5, 7))
    training.manager.close()
    assert steps(tmp_path) == [5, 7]


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


def test_what_was_restored_is_no_step_that_was_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)
    with training.manager as manager:
        training.run(1, 7)
        manager.wait()
        manager.restore(5, training.state)
    assert steps(tmp_path) == [5]
    assert caplog.messages == []


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
