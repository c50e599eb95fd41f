"""A state on the host may change the moment that save returns, while the companion has read nothing of it yet."""

import copy
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepkeeper import CheckpointManager, PerRank
from stepkeeper_testing.trainer import open_manager


@contextmanager
def held_up(manager: CheckpointManager) -> Iterator[None]:
    """The companion does nothing until the block is left."""
    pid = manager.health().companion_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def snapshots_kept(root: Path, state: dict[str, Any], change: Callable[[int], None]) -> list[int]:
    """Steps that were saved, `state` changed behind each at once, and that a restore has found as they were."""
    found: list[int] = []
    with open_manager(root, max_pending=2) as manager:
        manager.save(0, state).result()
        for first in (1, 3):
            then: dict[int, Any] = {}
            with held_up(manager):
                for step in (first, first + 1):
                    then[step] = contents(state)
                    manager.save(step, state)
                    change(step)
                    assert not same(contents(state), then[step]), "there would be nothing to see"
            assert manager.wait(60)
            for step, expected in then.items():
                manager.restore(state, step)
                if same(contents(state), expected):
                    found.append(step)
    return found


def contents(state: dict[str, Any]) -> dict[str, Any]:
    """A copy, of the insides of objects."""
    return {name: copy.deepcopy(inside(value)) for name, value in state.items()}


def inside(value: Any) -> Any:
    if isinstance(value, PerRank):
        return inside(value.value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


@pytest.mark.parametrize("how", ["foreach", "fused", "one by one"])
def test_a_module_and_its_optimizer_that_steps_at_once(tmp_path: Path, how: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 3))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.1, amsgrad=True, foreach=how == "foreach", fused=how == "fused"
    )

    def train(step: int) -> None:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(torch.randn(8, 40)).square().sum().backward()
        optimizer.step()

    train(0)
    assert snapshots_kept(tmp_path, {"model": model, "optimizer": optimizer}, train) == [1, 2, 3, 4]


def test_arrays_of_numpy_and_values_of_one_rank_that_are_written_to(tmp_path: Path) -> None:
    whole = np.arange(60.0).reshape(6, 10)
    shared = torch.zeros(5)
    state: dict[str, Any] = {
        "whole": whole,
        "turned": np.arange(6).reshape(2, 3).T,
        "in a list": [np.zeros(3), {"deeper": np.ones((2, 2), dtype=np.int8)}],
        "scalar": np.array(1.5),
        "of torch": shared,
        "of one rank": PerRank({"t": torch.zeros(4), "n": [1]}),
    }
    seen_by_numpy = shared.numpy()

    def change(step: int) -> None:
        arrays = state["whole"], state["turned"], state["in a list"][0], state["in a list"][1]["deeper"]
        for array in (*arrays, seen_by_numpy):
            array[...] += step
        state["scalar"][...] += step
        own: Any = state["of one rank"].value
        own["t"] += step
        own["n"].append(step)

    assert snapshots_kept(tmp_path, state, change) == [1, 2, 3, 4]


FOLDER = Path(__file__).parent / "snapshots"
Said = Callable[..., dict[str, Any]]


@pytest.fixture
def said_by(run_on_devices: Callable[..., str]) -> Said:
    def run(script: str, *arguments: object, **options: Any) -> dict[str, Any]:
        return dict(json.loads(run_on_devices(FOLDER / script, *arguments, **options).splitlines()[-1]))

    return run


def test_sharded_tensors_are_saved_as_they_were_at_any_device_budget(said_by: Said, tmp_path: Path) -> None:
    said = said_by("intact_xla.py", tmp_path)
    for budget, found in said.items():
        assert found["wrong"] == [], budget
        assert found["tensors"] > 30
    copied, moved = "copied there", "moved while waiting"
    assert {budget: found["ways"] for budget, found in said.items()} == {
        "all": [copied],
        "half": [copied, moved],
        "none": [moved],
        "all, before the loop's own sync": [copied],
        "learned": [copied, moved],
    }


@pytest.mark.smoke
def test_saves_disturb_nothing_and_a_restored_training_goes_on_bit_by_bit(
    said_by: Said, max_isa: str, tmp_path: Path
) -> None:
    uri = (tmp_path / "root").as_uri()
    saved = said_by("going_on.py", "save", uri, max_isa=max_isa)
    assert saved["same"], "random numbers and arithmetic are those of a training that never saves"
    assert saved["later_compilations"] == 0, "neither a step nor a snapshot is compiled again"
    restored = said_by("going_on.py", "restore", uri, max_isa=max_isa)
    assert restored["step"] == 5
    assert restored["bits"] == saved["bits"]
    assert "devices=[2,2]" in restored["spec"]


def test_one_small_program_is_compiled_for_all_saves_and_ahead_of_the_first(
    said_by: Said, tmp_path: Path
) -> None:
    counts = said_by("compiling.py", tmp_path, timeout_s=560)
    assert counts["with"] == counts["without"] + 1
    assert counts["for a notice"] == 0
