"""States of many tensors: their bytes are placed block by block, and the save after a restore is planned beside it."""

import random
import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepkeeper import CheckpointManager
from stepkeeper.checkpoint.blocks import Block
from stepkeeper.checkpoint.manifest import BLOCK_BYTES
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import PartlyRestoredError
from stepkeeper.restore.loading import Loading
from stepkeeper.restore.placing import WholeTensors
from stepkeeper.save.snapshot.take import SnapshotTaker

SIZES_BYTES = (BLOCK_BYTES - 40, 24, 64, 8)
"""The third tensor has bytes in two blocks."""


def test_tensors_get_their_bytes_in_any_order_and_parts() -> None:
    stored = np.random.default_rng(1).integers(0, 256, sum(SIZES_BYTES) + 8, dtype=np.uint8)
    blocks = [
        Block(number=n, path="a", index=n, size_bytes=min(BLOCK_BYTES, stored.size - n * BLOCK_BYTES))
        for n in range(2)
    ]
    wholes = [WholeTensors(), WholeTensors()]
    ends = np.cumsum(SIZES_BYTES).tolist()
    # The first and the last one are tied in the checkpoint, not in the state.
    places = [*zip([0, *ends], SIZES_BYTES, strict=False), (0, SIZES_BYTES[0]), (ends[2], 8)]
    random.Random(1).shuffle(places)
    tensors = [(start, torch.zeros(size // 4, dtype=torch.int32)) for start, size in places]
    for start, tensor in tensors:
        for block, whole in zip(blocks, wholes, strict=True):
            if start < block.start + block.size_bytes and start + tensor.nbytes > block.start:
                whole.add(tensor, start, block)
    assert sum(whole.n_lacking for whole in wholes) == sum(tensor.nbytes for _, tensor in tensors)
    cuts = [0, 5, *range(BLOCK_BYTES - 60, stored.size, 7), stored.size]
    parts = [(low, high) for low, high in pairwise(cuts) if low < high]
    random.Random(2).shuffle(parts)
    for block, whole in zip(blocks, wholes, strict=True):
        whole.sort()
        for low, high in parts:
            first, end = max(low, block.start), min(high, block.start + block.size_bytes)
            if first < end:
                whole.n_lacking -= whole.copy_bytes(first, stored[first:end])
    assert [whole.n_lacking for whole in wholes] == [0, 0]
    for start, tensor in tensors:
        assert tensor.numpy().tobytes() == stored[start : start + tensor.nbytes].tobytes()


def saved(root: Path) -> None:
    with CheckpointManager(root, save=1) as manager:
        manager.save(1, {"w": torch.arange(4.0), "v": [1, 2]}).result()


def change_nothing(state: dict[str, Any]) -> None:
    state["w"] += 1


def change_structure(state: dict[str, Any]) -> None:
    state["w"] = torch.arange(3.0)
    state["more"] = torch.ones(2)


@pytest.mark.parametrize("change", [change_nothing, change_structure])
def test_a_restore_returns_before_the_next_save_is_planned_and_that_save_has_the_state_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    saved(tmp_path)
    may_plan, is_planned = threading.Event(), threading.Event()
    prepare, await_all, take = SnapshotTaker.prepare, Waits.await_all, SnapshotTaker.take_snapshot

    def prepare_late(*arguments: Any) -> int:
        assert may_plan.wait(60), "the restore waits for the plan"
        size_bytes = prepare(*arguments)
        is_planned.set()
        return size_bytes

    def await_plan(*arguments: Any) -> bool:
        may_plan.set()
        return await_all(*arguments)

    def take_planned(*arguments: Any, **options: Any) -> Any:
        assert is_planned.is_set()
        return take(*arguments, **options)

    state: dict[str, Any] = {"w": torch.zeros(4), "v": [0, 0]}
    with CheckpointManager(tmp_path, save=1) as manager:
        monkeypatch.setattr(SnapshotTaker, "prepare", prepare_late)
        restored = manager.restore(state)
        assert restored is not None
        assert not is_planned.is_set()
        change(state)
        monkeypatch.setattr(Waits, "await_all", await_plan)
        monkeypatch.setattr(SnapshotTaker, "take_snapshot", take_planned)
        manager.save(2, state).result()
    monkeypatch.undo()
    again: dict[str, Any] = {name: torch.zeros_like(each) for name, each in state.items() if name != "v"}
    again["v"] = [0]
    with CheckpointManager(tmp_path, save=1) as manager:
        manager.restore(again, 2)
    assert again.keys() == state.keys()
    assert all(each.equal(state[name]) if name != "v" else each == [1, 2] for name, each in again.items())


def test_an_error_of_the_plan_made_after_a_restore_is_raised_by_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    plans: list[str] = []

    def fail(*_: object, **__: object) -> Mapping[str, object]:
        plans.append(threading.current_thread().name)
        raise RuntimeError("no plan")

    state = {"w": torch.zeros(4), "v": [0, 0]}
    with CheckpointManager(tmp_path, save=1) as manager:
        with monkeypatch.context() as broken:
            broken.setattr("stepkeeper.save.snapshot.plan.plan_save", fail)
            assert manager.restore(state) is not None
            with pytest.raises(RuntimeError, match="no plan"):
                manager.save(2, state)
        assert plans == ["save-transfer", threading.current_thread().name]
        manager.save(2, state).result()
        assert manager.steps() == [1, 2]


@pytest.mark.parametrize("n_bytes", [0, 12])
def test_a_tensor_whose_memory_was_released_is_named_and_not_written(tmp_path: Path, n_bytes: int) -> None:
    with CheckpointManager(tmp_path, save=1) as manager:
        manager.save(1, {"w": torch.ones(100)}).result()
    state = {"w": torch.zeros(100)}
    state["w"].untyped_storage().resize_(n_bytes)
    with CheckpointManager(tmp_path, save=1) as manager, pytest.raises(PartlyRestoredError) as raised:
        manager.restore(state)
    assert "too small for its 400 bytes" in str(raised.value.__cause__)


def test_a_tensor_whose_memory_is_replaced_after_the_plan_is_filled_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Loading.fill_tensors

    def replace_and_fill(loading: Loading) -> dict[str, Any]:
        state["w"].data = torch.zeros(100)
        return fill(loading)

    state = {"w": torch.ones(100)}
    with CheckpointManager(tmp_path, save=1) as manager:
        manager.save(1, state).result()
        monkeypatch.setattr(Loading, "fill_tensors", replace_and_fill)
        manager.restore(state)
    assert state["w"].eq(1).all()


def test_a_manager_that_is_closed_while_saves_are_planned_reports_no_lost_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_closed = threading.Event()
    prepare = SnapshotTaker.prepare

    def prepare_late(*arguments: Any) -> int:
        is_closed.wait(60)
        return prepare(*arguments)

    state = {"w": torch.ones(100)}
    with CheckpointManager(tmp_path, save=1) as manager:
        manager.save(1, state).result()
    manager = CheckpointManager(tmp_path, save=1)
    monkeypatch.setattr(SnapshotTaker, "prepare", prepare_late)
    manager.restore(state)
    manager.close()
    is_closed.set()
    assert "given up" not in caplog.text
