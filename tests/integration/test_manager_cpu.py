"""The manager in this process, its companion in another, on CPU tensors and a folder."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

from stepkeeper.errors import RestoreError
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_planners.errors import UnsupportedValueError
from stepkeeper_testing.damage import flip
from stepkeeper_testing.trainer import open_manager

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool)


def new_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(33, 20), torch.nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 33)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "kinds": {str(dtype): (torch.randn(5, 7) * 9).to(dtype) for dtype in DTYPES},
        "odd": [torch.randn(6, 8).t(), torch.randn(()), torch.empty(0, 3)],
        "loader": {"epoch": 3 + seed, "order": np.arange(10 + seed), "name": f"shard-{seed}"},
        "rng": {"python": random.getstate(), "torch": torch.get_rng_state()},
    }


def flat(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    if isinstance(state, dict | list):
        for key, item in state.items() if isinstance(state, dict) else enumerate(state):
            yield from flat(item, f"{path}.{key}")
    else:
        yield path, state


def assert_same(left: Any, right: Any) -> None:
    rights = dict(flat(right))
    for path, value in flat(left):
        other = rights.pop(path)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype
            assert torch.equal(value, other), path
        elif isinstance(value, np.ndarray):
            assert np.array_equal(value, other), path
        else:
            assert value == other, path
    assert not rights


def slots(uri: str) -> list[str]:
    log, store = Log(open_store(uri)), open_store(uri)
    tail = log.open().tail
    kinds = ("begin", "restored", "commit", "delete", "quarantine", "void")
    entries = [store.read(f".stepkeeper/log/{slot:08d}.json").decode() for slot in range(tail + 1)]
    return [next(kind for kind in kinds if f'"kind":"{kind}"' in entry) for entry in entries]


@pytest.mark.smoke
def test_what_is_restored_is_what_was_saved_bit_by_bit(uri: str) -> None:
    saved = new_state()
    with open_manager(uri) as manager:
        assert manager.restore(saved) is None
        manager.save(7, saved).result()
    other = new_state(seed=1)
    with open_manager(uri) as manager:
        result = manager.restore(other)
    assert result is not None
    assert (result.step, result.sequence) == (7, 1)
    assert_same(saved, other)
    assert slots(uri) == ["begin", "commit", "begin", "restored"]


@pytest.mark.smoke
def test_stock_torch_loads_the_folder(uri: str) -> None:
    tied = torch.nn.Parameter(torch.randn(4, 5))
    with open_manager(uri) as manager:
        saved = {"a": {"w": tied, "tied": tied}, "steps": 4, "b": torch.arange(6).view(2, 3)}
        manager.save(1, saved).result()
        folder = manager.metadata(1).uri.removeprefix("file://")
    state: dict[str, Any] = {
        "a": {"w": torch.zeros(4, 5), "tied": torch.zeros(4, 5)},
        "steps": 0,
        "b": torch.zeros(2, 3, dtype=torch.int64),
    }
    with warnings.catch_warnings():
        # It says that there is one process only.
        warnings.simplefilter("ignore", UserWarning)
        stock_load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["a"]["w"], tied)
    assert torch.equal(state["a"]["tied"], tied)
    assert state["steps"] == 4
    assert torch.equal(state["b"], torch.arange(6).view(2, 3))


def test_what_was_condemned_is_not_taken_for_nothing(uri: str) -> None:
    with open_manager(uri) as manager:
        manager.save(1, {"w": torch.zeros(3000)}).result()
    flip(next(Path(uri.removeprefix("file://")).glob("1/*/*.distcp")))
    for problem in ("read bad", "no latest one; quarantined: 1 "):
        manager = open_manager(uri)
        for complaint in (problem, "no latest one; quarantined: 1 "):
            with pytest.raises(RestoreError, match=complaint):
                manager.restore({"w": torch.zeros(3000)})
        manager.close()


def test_a_value_that_cannot_be_stored_is_refused_by_name(uri: str) -> None:
    manager = open_manager(uri)
    with pytest.raises(UnsupportedValueError, match=r"loader\.lock"):
        manager.save(1, {"loader": {"lock": object()}}).result()
    manager.save(2, {"w": torch.zeros(1)}).result()
    manager.close()
