"""How often a manager calls state_dict(), which has side effects in some objects: a data loader makes its iterator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager, PerRank, Whole, prime_optimizer

Given = Callable[["Recorder"], Any]
Save = Callable[[CheckpointManager, int, dict[str, Any]], object]

GIVEN: dict[str, Given] = {
    "plain": lambda part: part,
    "PerRank": PerRank,
    "Whole": Whole,
    "in a PerRank's dict": lambda part: PerRank({"a": part}),
}
SAVES: dict[str, Save] = {
    "step": lambda manager, step, state: manager.step(step, state),
    "save": lambda manager, step, state: manager.save(step, state),
    "save_async": lambda manager, step, state: manager.save_async(step, state),
    "forced": lambda manager, step, state: manager.save(step, state, force=True),
}


class Recorder:
    """Record its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tensor = torch.ones(2)

    def take_calls(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"n": 1, "t": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["t"], torch.ones(2))
        self.calls.append("load_state_dict")


def open_manager(root: Path, interval: int = 1) -> CheckpointManager:
    return CheckpointManager(root, interval, chkpt_on_preemption=False)


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_a_save_calls_state_dict_once(tmp_path: Path, save: Save) -> None:
    part = Recorder()
    state = {"part": part}
    with open_manager(tmp_path) as manager:
        for step in (1, 2, 3):
            save(manager, step, state)
            manager.wait()
            assert part.take_calls() == ["state_dict"]
    assert not part.take_calls()


@pytest.mark.smoke
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_restore_calls_state_dict_before_load_state_dict_and_never_after_it(
    tmp_path: Path, given: Given
) -> None:
    with open_manager(tmp_path) as manager:
        manager.save(1, {"part": given(Recorder())})
    part = Recorder()
    part.tensor.zero_()
    with open_manager(tmp_path) as manager:
        assert manager.restore_latest({"part": given(part)})
        assert part.take_calls() == ["state_dict", "load_state_dict"]
        manager.restore(1, {"part": given(part)})
        assert part.take_calls() == ["state_dict", "load_state_dict"]
    assert not part.take_calls()


@pytest.mark.parametrize(
    "unready",
    [{}, [torch.nn.Linear(2, 2, device="meta")], torch.nn.LazyLinear(2)],
    ids=["empty", "on no device", "lazy"],
)
def test_a_first_start_takes_a_state_that_cannot_be_saved_before_its_first_step(
    tmp_path: Path, unready: Any
) -> None:
    state = {"part": unready}
    with open_manager(tmp_path) as manager:
        assert manager.restore_latest(state) is None
        state["part"] = torch.ones(2)
        manager.step(1, state)
        manager.wait()
        assert manager.all_steps() == [1]


@pytest.mark.smoke
@pytest.mark.parametrize("primed", [False, True])
def test_an_optimizer_that_was_not_primed_is_warned_of_at_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, primed: bool
) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state: dict[str, Any] = {"w": weight, "log": [], "optimizer": torch.optim.AdamW([weight])}
    if primed:
        prime_optimizer(state["optimizer"])
    with open_manager(tmp_path) as manager:
        manager.restore_latest(state)
        for step in (1, 2):
            torch.autograd.backward(weight.sum())
            state["optimizer"].step()
            state["log"].append({"step": step})
            manager.step(step, state)
    warnings = [
        each for each in caplog.messages if "prime_optimizer(optimizer) before restore_latest" in each
    ]
    assert [each.startswith("step 1 is saved") for each in warnings] == ([] if primed else [True])


def test_an_optimizer_that_a_partial_restore_leaves_unprimed_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with open_manager(tmp_path) as manager:
        manager.save(1, {"w": weight})
    optimizer = torch.optim.AdamW([weight])
    state = {"w": weight, "optimizer": optimizer}
    with open_manager(tmp_path) as manager:
        manager.restore_latest(state, items=["w"])
        torch.autograd.backward(weight.sum())
        optimizer.step()
        manager.save(2, state)
    assert "prime_optimizer(optimizer) before restore_latest" in caplog.text
