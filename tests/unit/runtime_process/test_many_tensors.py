"""States of many tensors: their bytes are placed block by block, and the save after a restore is planned beside it."""

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from stepkeeper import CheckpointManager
from stepkeeper.checkpoint.blocks import Block, BlockTable
from stepkeeper.checkpoint.manifest import BLOCK_BYTES
from stepkeeper.checkpoint.reading import BlockReader
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import PartlyRestoredError
from stepkeeper.restore import filling, planning
from stepkeeper.restore.loading import Loading
from stepkeeper.restore.placing import Places, StoredBytes, WholeTensors
from stepkeeper.save.snapshot.take import SnapshotTaker
from stepkeeper.storage import Store
from stepkeeper.storage.posix import PosixStore
from stepkeeper_testing.memory import MemoryStore

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
                whole.add(tensor, start, start + tensor.nbytes, block)
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


class CountingReader:
    """Reads blocks of one byte, and counts those that are read at once."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.n_reading = self.most = 0
        self.lock = threading.Lock()

    def read_block(self, _path: str, _block: int, /) -> bytes:
        with self.lock:
            self.n_reading += 1
            self.most = max(self.most, self.n_reading)
        time.sleep(self.takes_s)
        with self.lock:
            self.n_reading -= 1
        return b"x"


@pytest.mark.parametrize(("takes_s", "waited_s", "most"), [(0.05, 0.01, 8), (0.01, 1e9, 2)])
def test_more_blocks_than_cpus_are_read_at_once_only_if_the_store_is_slow(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, waited_s: float, most: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    monkeypatch.setattr(filling, "_WAITED_S", waited_s)
    blocks = tuple(Block(number=n, path="a", index=n, size_bytes=1) for n in range(48))
    places, reader = Places(), CountingReader(takes_s)
    for block in blocks:
        places.add_checked(block)
    table = BlockTable(blocks=blocks, first_numbers={"a": 0})
    filling.Filling(reader, table, places).run({block.number: () for block in blocks})
    assert reader.most == most


@pytest.mark.parametrize("n_allowed", [0, 1])
def test_a_process_that_may_have_no_more_threads_restores_with_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch, n_allowed: int
) -> None:
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if thread.name.startswith("restore-") and int(thread.name.removeprefix("restore-")) >= n_allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {*range(8)})
    monkeypatch.setattr(threading.Thread, "start", start_few)
    blocks = tuple(Block(number=n, path="a", index=n, size_bytes=1) for n in range(9))
    places, reader = Places(), CountingReader(0.0)
    for block in blocks:
        places.add_checked(block)
    filled = filling.Filling(reader, BlockTable(blocks=blocks, first_numbers={"a": 0}), places)
    with nullcontext() if n_allowed else pytest.raises(RuntimeError, match="new thread"):
        filled.run({block.number: () for block in blocks})
    assert sum(place.n_lacking for place in places.all) == (0 if n_allowed else 9)


def test_a_tensor_that_gets_other_memory_between_two_pieces_is_not_written_beyond_it() -> None:
    tensor, whole = torch.zeros(64, dtype=torch.uint8), WholeTensors()
    whole.add(tensor, 0, 64, Block(number=0, path="a", index=0, size_bytes=64))
    data, before = np.arange(64, dtype=np.uint8), tensor.detach()
    assert whole.copy_bytes(0, data[:32]) == 32
    tensor.data = (beside := torch.zeros(64, dtype=torch.uint8))[:8]
    assert whole.copy_bytes(32, data[32:]) == 32
    assert beside.eq(0).all()
    assert before.numpy().tolist() == data.tolist()


class StreamingReader(CountingReader):
    """Reads blocks of one byte in a piece. The streamed ones of uneven numbers are bad."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.streamed: list[int] = []
        self.read: list[int] = []

    def stream_block(self, _path: str, block: int, put: Callable[[int, bytes], None], /) -> bool:
        self.streamed.append(block)
        put(0, b"?" if block % 2 else b"x")
        return block % 2 == 0

    @override
    def read_block(self, path: str, block: int, /) -> bytes:
        self.read.append(block)
        return super().read_block(path, block)


def test_a_block_that_was_bad_when_it_was_streamed_is_read_again_as_a_whole() -> None:
    blocks = tuple(Block(number=n, path="a", index=n, size_bytes=1) for n in range(6))
    places, reader, rest = (
        Places(),
        StreamingReader(),
        [StoredBytes.empty("a", blocks[4].start, 1) for _ in range(17)],
    )
    values = [StoredBytes.empty("a", block.start, 1) for block in blocks]
    for number, value in enumerate(values):
        places.values[str(number)], places.by_block[number] = value, [value]
    # Each of them would look at each piece.
    places.by_block[4] += rest
    places.held |= dict(enumerate(rest))
    table = BlockTable(blocks=blocks, first_numbers={"a": 0})
    filled = filling.Filling(reader, table, places)
    filled.run({block.number: () for block in blocks})
    assert [bytes(value.data) for value in [*values, *rest]] == [b"x"] * 23
    assert not any(value.n_lacking for value in [*values, *rest])
    assert [sorted(reader.streamed), sorted(reader.read)] == [[0, 1, 2, 3, 5], [1, 3, 4, 5]]


def test_a_block_is_streamed_only_if_it_is_right_and_the_store_can(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save=1) as manager:
        manager.save(1, {"w": torch.arange(10e6)}).result()
    store = PosixStore(tmp_path)
    found = planning.read_head(store)
    assert found is not None
    record, (manifest,) = found
    name = max(manifest.objects, key=lambda each: each.size_bytes).path
    pieces: list[tuple[int, bytes]] = []

    def stream(from_store: Store) -> bool:
        pieces.clear()
        return BlockReader(from_store, (manifest,)).stream_block(name, 0, lambda *each: pieces.append(each))

    assert stream(store)
    assert len(pieces) > 1
    assert b"".join(piece for _, piece in pieces) == BlockReader(store, (manifest,)).read_block(name, 0)
    assert [first for first, _ in pieces] == [n << 20 for n in range(len(pieces))]
    assert not stream(MemoryStore())
    assert not pieces
    path = tmp_path / record.folder / name
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-1])
    assert not stream(store)
    data[-1] ^= 1
    path.write_bytes(data)
    assert not stream(store)
    path.unlink()
    assert not stream(store)


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
