"""A commit's files, read in small blocks: each is fetched about once, whoever wrote what of a tensor."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper.checkpoint import files as module
from stepkeeper.checkpoint import reading
from stepkeeper.checkpoint.files import CommitFiles
from stepkeeper.checkpoint.finishing import finish_checkpoint
from stepkeeper.checkpoint.writing import write_checkpoint
from stepkeeper.errors import TornCheckpointError
from stepkeeper.log import CommitRecord, Log
from stepkeeper_planners import formats
from stepkeeper_planners.formats import checkpoint_reader
from stepkeeper_testing.checkpoints import save_order, tensor_order
from stepkeeper_testing.memory import MemoryStore

BLOCK_BYTES = 32 * 1024
STATE = {f"layer{n}": torch.arange(65536.0).reshape(256, 256) + n for n in range(6)}
RANKS = 4
WIDTH = 256 // RANKS


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (reading, module, checkpoint_reader):
        name = "BUFFER_BYTES" if each is checkpoint_reader else "BLOCK_BYTES"
        monkeypatch.setattr(each, name, BLOCK_BYTES)
    monkeypatch.setattr("stepkeeper.checkpoint.writing.BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(CommitFiles, "block_bytes", BLOCK_BYTES)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def record(store: MemoryStore) -> CommitRecord:
    """Each rank has written some columns of each tensor."""
    log = Log(store)
    claim = log.begin()
    manifests = []
    for rank in range(RANKS):
        orders, data = [], bytearray()
        for fqn, tensor in STATE.items():
            offsets, sizes = (0, rank * WIDTH), (256, WIDTH)
            orders.append(tensor_order(fqn, (256, 256), offsets=offsets, sizes=sizes, start=len(data)))
            data += tensor[:, rank * WIDTH : (rank + 1) * WIDTH].contiguous().numpy().tobytes()
        order = save_order(orders, rank=rank, world_size=RANKS, claim=claim.slot)
        manifests.append(write_checkpoint(store, order, memoryview(data)))
    own, *others = manifests
    done = finish_checkpoint(store, own, [manifest.make_ref() for manifest in others])
    return log.commit(claim, step=1, folder=own.folder, size_bytes=done.size_bytes, manifest=done.manifest)


def test_each_block_is_fetched_about_once(store: MemoryStore, record: CommitRecord, tmp_path: Path) -> None:
    read, blocks = store.read, Counter[tuple[str, int]]()

    def counted(path: str, offset: int = 0, length: int | None = None) -> bytes:
        ends = offset if length is None else offset + length
        blocks.update((path, block) for block in range(offset // BLOCK_BYTES, -(-ends // BLOCK_BYTES)))
        return read(path, offset, length)

    store.read = counted  # type: ignore[method-assign]  # it counts
    with CommitFiles(store, record) as files:
        formats.checkpoint_to_torch_save(files, tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(state[fqn], tensor) for fqn, tensor in STATE.items())
    assert blocks.total() <= 1.3 * len(blocks)


def test_any_part_is_what_was_written_and_a_bad_block_is_an_error_only_where_it_is_read(
    store: MemoryStore, record: CommitRecord
) -> None:
    path = f"{record.folder}/__1_0.distcp"
    want = store.read(path)
    chooser = random.Random(1)
    spans = [sorted(chooser.choices(range(len(want) + 100), k=2)) for _ in range(300)]

    def read(files: CommitFiles, start: int, end: int) -> Any:
        with files.open("__1_0.distcp") as file:
            file.seek(start)
            return file.read(end - start)

    with CommitFiles(store, record) as files, ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda span: read(files, *span), spans)
        assert list(found) == [want[start:end] for start, end in spans]
        with pytest.raises(FileNotFoundError, match=r"no manifest lists 'x'"):
            files.open("x")
    store.bucket.objects[path] = want[: 5 * BLOCK_BYTES] + b"\0" * BLOCK_BYTES + want[6 * BLOCK_BYTES :]
    with CommitFiles(store, record) as files:
        assert read(files, 0, 4 * BLOCK_BYTES) == want[: 4 * BLOCK_BYTES]
        assert read(files, 6 * BLOCK_BYTES, len(want)) == want[6 * BLOCK_BYTES :]
        with pytest.raises(TornCheckpointError, match="block 5 of"):
            read(files, 5 * BLOCK_BYTES, 5 * BLOCK_BYTES + 1)
