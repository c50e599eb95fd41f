"""What a manager is given as `state`, and how often it calls state_dict(), which has side effects in some objects."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from stepkeeper import CheckpointManager, PerRank, Whole, prime_optimizer
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.trainer import open_manager

CALLS: dict[str, Callable[[CheckpointManager, Any], object]] = {
    "step": lambda manager, state: manager.step(1, state),
    "save": lambda manager, state: manager.save(1, state),
    "restore": lambda manager, state: manager.restore(state),
    "restore a step": lambda manager, state: manager.restore(state, 1),
}
REFUSED = [
    *(
        pytest.param(
            lambda manager, call=call, state=state: call(manager, state),
            "state is a dict, or an object with state_dict",
            id=f"{name}: {of}",
        )
        for name, call in CALLS.items()
        for of, state in {"None": None, "a tensor": torch.zeros(2), "a class": torch.nn.Linear}.items()
    ),
    *(
        pytest.param(
            lambda manager, call=call, metrics=metrics: getattr(manager, call)(1, {"n": 1}, metrics),
            r"metrics is a dict of numbers by name, not a value of type \w+",
            id=f"{call} with metrics {metrics}",
        )
        for call in ("step", "save")
        for metrics in (0.5, True, [("loss", 0.5)])
    ),
    *(
        pytest.param(
            lambda manager, given=given: manager.step(1, lambda: given),
            f"function given as the state of step 1 returned a value of type {type(given).__name__}",
            id=f"a function that returns {given}",
        )
        for given in (None, 3, print)
    ),
]


@pytest.mark.parametrize(("call", "says"), REFUSED)
def test_what_is_no_state_is_refused_before_anything_is_written(
    uri: str, call: Callable[[CheckpointManager], object], says: str
) -> None:
    with open_manager(uri) as manager:
        with pytest.raises(TypeError, match=says):
            call(manager)
        assert manager.health().companion_pid is None
    assert not Log(open_store(uri)).open().commits


STEPS: dict[str, Callable[[CheckpointManager, Any], object]] = {
    "step": lambda manager, step: manager.step(step, {"w": torch.zeros(2)}),
    "save": lambda manager, step: manager.save(step, {"w": torch.zeros(2)}),
    "restore": lambda manager, step: manager.restore({"w": torch.zeros(2)}, step),
    "metadata": lambda manager, step: manager.metadata(step),
    "verify": lambda manager, step: manager.verify(step),
}


@pytest.mark.parametrize("call", STEPS)
def test_a_step_is_a_whole_number_of_any_library(uri: str, call: str) -> None:
    with open_manager(uri) as manager:
        manager.save(3, {"w": torch.zeros(2)}).result()
        for step in (np.int64(3), torch.tensor(3)):
            STEPS[call](manager, step)
        for wrong in (3.0, "3", [3], True):
            with pytest.raises(TypeError, match="step must be a whole number, not a value of type"):
                STEPS[call](manager, wrong)


def test_a_function_is_called_once_for_each_save_and_never_besides(uri: str) -> None:
    calls: list[int] = []

    def build() -> dict[str, Any]:
        calls.append(step)
        return {"w": torch.full((3,), float(step)), "step": step}

    with open_manager(uri, 5) as manager:
        for step in range(1, 12):
            manager.step(step, build)
        assert calls == [5, 10]
        for step in (12, 13):
            manager.save(step, build)
        assert calls == [5, 10, 12, 13]
    found: dict[str, Any] = {"w": torch.zeros(3), "step": 0}
    with open_manager(uri) as manager:
        for step in (5, 10, 12, 13):
            manager.restore(found, step)
            assert (found["step"], found["w"].tolist()) == (step, [step] * 3)


def test_the_error_of_a_function_is_raised_as_it_is_and_says_where_it_came_from(uri: str) -> None:
    def build() -> dict[str, Any]:
        raise KeyError("ema")

    with open_manager(uri) as manager:
        with pytest.raises(KeyError, match="ema") as raised:
            manager.step(1, build)
        assert raised.value.__notes__ == ["raised by the function given as the state of step 1"]
        # Nothing of it is left: the next save goes on.
        manager.step(2, lambda: {"n": 2})
    assert [commit.step for commit in Log(open_store(uri)).open().commits.values()] == [2]


@pytest.mark.parametrize("call", ["restore", "restore a step"])
def test_a_restore_refuses_a_function_because_values_would_be_lost(uri: str, call: str) -> None:
    with open_manager(uri) as manager:
        manager.save(1, {"n": 1}).result()
        with pytest.raises(TypeError, match="needs a state dict, not a function: call it"):
            CALLS[call](manager, lambda: {"n": 0})


Given = Callable[["Recorder"], Any]
GIVEN: dict[str, Given] = {
    "plain": lambda part: part,
    "PerRank": PerRank,
    "Whole": Whole,
    "in a PerRank's dict": lambda part: PerRank({"a": part}),
}


class Recorder:
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


@pytest.mark.parametrize("call", ["step", "save"])
def test_a_save_calls_state_dict_once(tmp_path: Path, call: str) -> None:
    part = Recorder()
    with open_manager(tmp_path) as manager:
        for step in (1, 2, 3):
            getattr(manager, call)(step, {"part": part})
            manager.wait()
            assert part.take_calls() == ["state_dict"]
    assert not part.take_calls()


class Failing(Recorder):
    @override
    def state_dict(self) -> dict[str, Any]:
        super().state_dict()
        raise KeyError("not built yet")


@pytest.mark.parametrize("has_commit", [False, True])
def test_a_restore_calls_a_state_dict_that_fails_only_once(tmp_path: Path, has_commit: bool) -> None:
    # Another rank's may have succeeded. If it exchanges data between ranks, a second call would wait for that rank.
    if has_commit:
        with open_manager(tmp_path) as manager:
            manager.save(1, {"part": Recorder()}).result()
    part = Failing()
    with open_manager(tmp_path) as manager:
        with pytest.raises(KeyError, match="not built yet") if has_commit else nullcontext():
            manager.restore({"part": part})
        assert part.take_calls() == ["state_dict"]


@pytest.mark.smoke
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_restore_calls_state_dict_before_load_state_dict_and_never_after_it(
    tmp_path: Path, given: Given
) -> None:
    with open_manager(tmp_path) as manager:
        manager.save(1, {"part": given(Recorder())}).result()
    part = Recorder()
    part.tensor.zero_()
    with open_manager(tmp_path) as manager:
        assert manager.restore({"part": given(part)})
        assert part.take_calls() == ["state_dict", "load_state_dict"]
        manager.restore({"part": given(part)}, 1)
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
        assert manager.restore(state) is None
        state["part"] = torch.ones(2)
        manager.step(1, state)
        manager.wait()
        assert manager.steps() == [1]


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
        manager.restore(state)
        for step in (1, 2):
            torch.autograd.backward(weight.sum())
            state["optimizer"].step()
            state["log"].append({"step": step})
            manager.step(step, state)
    warnings = [each for each in caplog.messages if "prime_optimizer(optimizer) before the restore" in each]
    assert [each.startswith("step 1 is saved") for each in warnings] == ([] if primed else [True])


def test_an_optimizer_that_a_partial_restore_leaves_unprimed_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with open_manager(tmp_path) as manager:
        manager.save(1, {"w": weight}).result()
    optimizer = torch.optim.AdamW([weight])
    state = {"w": weight, "optimizer": optimizer}
    with open_manager(tmp_path) as manager:
        manager.restore(state, items=["w"])
        torch.autograd.backward(weight.sum())
        optimizer.step()
        manager.save(2, state).result()
    assert "prime_optimizer(optimizer) before the restore" in caplog.text


def trainer_at(step: int) -> dict[str, Any]:
    """Return a state as that of Hugging Face's Trainer."""
    return {
        "global_step": step,
        "log_history": [{"loss": 1 / n, "eval.loss": 2 / n, "step": n} for n in range(1, step + 1)],
        "best_metric": 1 / step if step else None,
        "stateful_callbacks": {"Stopping": {f"at {n}": n for n in range(1, step + 1)}} if step else {},
    }


@pytest.mark.parametrize("whole", [True, False], ids=["as a Whole", "as it is"])
def test_the_state_of_a_trainer_goes_on_after_a_restart(uri: str, *, whole: bool) -> None:
    for started_at in (0, 4, 8):
        found: Any = trainer_at(0)
        with open_manager(uri, 4) as manager:
            restored = manager.restore({"w": torch.zeros(2), "trainer": Whole(found) if whole else found})
            assert (restored.step if restored else 0) == started_at
            assert found == trainer_at(started_at)
            for step in range(started_at + 1, started_at + 5):
                now: Any = trainer_at(step)
                manager.step(step, {"w": torch.zeros(2), "trainer": Whole(now) if whole else now})
