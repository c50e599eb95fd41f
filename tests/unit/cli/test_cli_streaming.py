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
from stepkeeper.storage import Store, open_store
from stepkeeper_planners import formats
from stepkeeper_planners.formats import checkpoint_reader
from stepkeeper_testing.checkpoints import save_order, tensor_order
from stepkeeper_testing.pod import pod_identity

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")

BLOCK_BYTES = 32 * 1024
SIZE = 256
STATE = {
    f"layer{number}": torch.arange(float(SIZE * SIZE)).reshape(SIZE, SIZE) + number for number in range(6)
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (reading, module, checkpoint_reader):
        name = "BUFFER_BYTES" if each is checkpoint_reader else "BLOCK_BYTES"
        monkeypatch.setattr(each, name, BLOCK_BYTES)
    monkeypatch.setattr("stepkeeper.checkpoint.writing.BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(CommitFiles, "block_bytes", BLOCK_BYTES)


def committed(store: Store, n_ranks: int, dimension: int) -> CommitRecord:
    """Each rank has written its part along that dimension."""
    log = Log(store)
    claim = log.begin(pod_identity(), host="host")
    manifests = []
    for rank in range(n_ranks):
        orders, data = [], bytearray()
        for fqn, tensor in STATE.items():
            part = tensor.chunk(n_ranks, dimension)[rank].contiguous()
            offsets = tuple(rank * part.shape[axis] * (axis == dimension) for axis in (0, 1))
            sizes = tuple(part.shape)
            orders.append(tensor_order(fqn, (SIZE, SIZE), offsets=offsets, sizes=sizes, start=len(data)))
            data += part.numpy().tobytes()
        order = save_order(orders, rank=rank, world_size=n_ranks, claim=claim.slot)
        manifests.append(write_checkpoint(store, order, memoryview(data)))
    own, *others = manifests
    finished = finish_checkpoint(store, own, [manifest.make_ref() for manifest in others])
    return log.commit(
        claim, step=1, folder=own.folder, size_bytes=finished.size_bytes, manifest=finished.manifest
    )


class Counted:
    """Count how often each block is asked for."""

    def __init__(self, store: Store) -> None:
        self.store, self.uri = store, store.uri
        self.blocks: Counter[tuple[str, int]] = Counter()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Any:
        if length is not None:
            self.blocks.update(
                (path, block) for block in range(offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES))
            )
        return self.store.read(path, offset, length)

    def list(self, prefix: str) -> Any:
        return self.store.list(prefix)


@pytest.mark.parametrize("n_ranks", [1, 2, 8])
@pytest.mark.parametrize("dimension", [0, 1])
def test_each_block_is_fetched_about_once(n_ranks: int, dimension: int, tmp_path: Path) -> None:
    store = open_store((tmp_path / "root").as_uri())
    record = committed(store, n_ranks, dimension)
    counted: Any = Counted(store)
    with CommitFiles(counted, record) as files:
        formats.checkpoint_to_torch_save(files, tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(state[fqn], tensor) for fqn, tensor in STATE.items())
    assert counted.blocks.total() <= 1.3 * len(counted.blocks)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("root", "out.pt")]


def test_any_part_is_what_was_written(tmp_path: Path) -> None:
    store = open_store((tmp_path / "root").as_uri())
    record = committed(store, 2, 0)
    (path,) = [stat.path for stat in store.list(record.folder) if "__1_0" in stat.path]
    want = store.read(path)
    chooser = random.Random(1)
    spans = [sorted(chooser.choices(range(len(want) + 100), k=2)) for _ in range(300)]
    with CommitFiles(store, record) as files, ThreadPoolExecutor(4) as pool:

        def read(span: list[int]) -> bytes:
            with files.open(path.rpartition("/")[2]) as file:
                file.seek(span[0])
                return file.read(span[1] - span[0])

        assert list(pool.map(read, spans)) == [want[start:end] for start, end in spans]
        with pytest.raises(FileNotFoundError, match=r"no manifest lists 'x'"):
            files.open("x")


def test_a_bad_block_is_an_error_where_it_is_read_and_nowhere_else(tmp_path: Path) -> None:
    store = open_store((tmp_path / "root").as_uri())
    record = committed(store, 1, 0)
    (path,) = [stat.path for stat in store.list(record.folder) if "__0_0" in stat.path]
    good = store.read(path)
    store.delete(path)
    store.write(path, [good[: 5 * BLOCK_BYTES], b"\0" * BLOCK_BYTES, good[6 * BLOCK_BYTES :]])
    name = path.rpartition("/")[2]

    def read(files: CommitFiles, start: int, length: int) -> bytes:
        with files.open(name) as file:
            file.seek(start)
            return file.read(length)

    with CommitFiles(store, record) as files:
        assert read(files, 0, 4 * BLOCK_BYTES) == good[: 4 * BLOCK_BYTES]
        assert read(files, 6 * BLOCK_BYTES, len(good)) == good[6 * BLOCK_BYTES :]
        with pytest.raises(TornCheckpointError, match="block 5 of"):
            read(files, 5 * BLOCK_BYTES, 1)
