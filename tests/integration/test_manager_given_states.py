"""What a manager is given as `state`: a mapping, an object with state_dict(), or a function, and not nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager
from stepkeeper.log import Log
from stepkeeper.storage import open_store


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def open_manager(uri: str, interval: int = 1) -> CheckpointManager:
    return CheckpointManager(uri, interval, chkpt_on_preemption=False)


NO_STATES: dict[str, Any] = {
    "None": None,
    "a tensor": torch.zeros(2),
    "a class": torch.nn.Linear,
}
CALLS: dict[str, Any] = {
    "step": lambda manager, state: manager.step(1, state),
    "save": lambda manager, state: manager.save(1, state),
    "save_async": lambda manager, state: manager.save_async(1, state),
    "restore": lambda manager, state: manager.restore(1, state),
    "restore_latest": lambda manager, state: manager.restore_latest(state),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("state", NO_STATES.values(), ids=NO_STATES)
def test_what_is_no_state_is_refused_before_anything_is_written(uri: str, call: Any, state: Any) -> None:
    with open_manager(uri) as manager:
        with pytest.raises(TypeError, match="state is a dict, or an object with state_dict"):
            call(manager, state)
    assert not Log(open_store(uri)).open().commits


def test_a_function_is_called_once_for_each_save_and_never_besides(uri: str) -> None:
    calls: list[int] = []

    def build() -> dict[str, Any]:
        calls.append(step)
        return {"w": torch.full((3,), float(step)), "step": step}

    with open_manager(uri, 5) as manager:
        for step in range(1, 12):
            manager.step(step, build)
        assert calls == [5, 10]
        step = 12
        assert not manager.save(step, build)
        assert not manager.save_async(step, build)
        assert calls == [5, 10]
        assert manager.save(step, build, force=True)
        step = 13
        assert manager.save_async(step, build, force=True)
        assert calls == [5, 10, 12, 13]
    found: dict[str, Any] = {"w": torch.zeros(3), "step": 0}
    with open_manager(uri) as manager:
        for step in (5, 10, 12, 13):
            manager.restore(step, found)
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


@pytest.mark.parametrize(("given", "name"), [(None, "NoneType"), (3, "int"), (lambda: {"n": 1}, "function")])
def test_a_function_that_returns_no_state_is_refused(uri: str, given: Any, name: str) -> None:
    with open_manager(uri) as manager:
        with pytest.raises(
            TypeError, match=f"function given as the state of step 1 returned a value of type {name}"
        ):
            manager.step(1, lambda: given)


@pytest.mark.parametrize("call", ["restore", "restore_latest"])
def test_a_restore_refuses_a_function_because_values_would_be_lost(uri: str, call: str) -> None:
    with open_manager(uri) as manager:
        manager.save(1, {"n": 1})
        arguments = (1,) if call == "restore" else ()
        with pytest.raises(TypeError, match="is filled in place"):
            getattr(manager, call)(*arguments, lambda: {"n": 0})
