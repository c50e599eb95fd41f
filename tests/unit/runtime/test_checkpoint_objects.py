"""A checkpoint written by two ranks and read back: every byte verified, every kind of damage named."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from stepkeeper.checkpoint.blocks import Contents
from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors
from stepkeeper.checkpoint.finishing import FinishedCheckpoint, finish_checkpoint, verify_objects
from stepkeeper.checkpoint.inventory import ChunkRecord, Inventory, TensorRecord
from stepkeeper.checkpoint.manifest import Manifest, Shardings, split_inventory
from stepkeeper.checkpoint.orders import SaveOrder, Structure, ValueOrder
from stepkeeper.checkpoint.reading import BlockReader, read_manifests
from stepkeeper.checkpoint.writing import write_checkpoint
from stepkeeper.errors import (
    ManifestError,
    MissingObjectError,
    StorageError,
    TornCheckpointError,
    TransientStorageError,
    VerifyError,
)
from stepkeeper.log import CommitRecord, Log
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import save_order, tensor_order
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import MemoryStore

IMPATIENT = Patience(total_s=0.2, sleep=lambda _: None)
ROWS = [struct.pack("<8f", *range(row * 8, row * 8 + 8)) for row in range(6)]
VALUE = b"a torch.save blob"


def order(
    rank: int, *, world_size: int = 2, aliases: dict[str, str] | None = None
) -> tuple[SaveOrder, memoryview]:
    """Rank 0 writes rows 0 to 3 of `w` and the value, rank 1 rows 4 and 5 and a scalar."""
    rows, offsets = (ROWS[:4], (0, 0)) if rank == 0 else (ROWS[4:], (4, 0))
    data, values = b"".join(rows), []
    tensors = [tensor_order("w", (6, 8), offsets=offsets, sizes=(len(rows), 8))]
    if rank == 0:
        values.append(ValueOrder(fqn="step", start=len(data), length_bytes=len(VALUE)))
        data += VALUE
    else:
        tensors.append(tensor_order("s", (), start=len(data), dtype="int64"))
        data += struct.pack("<q", -7)
    save = save_order(tensors, values, rank=rank, world_size=world_size, step=10, aliases=aliases)
    return save, memoryview(bytearray(data))


@dataclass(frozen=True)
class Saved:
    store: MemoryStore
    finished: FinishedCheckpoint
    commit: CommitRecord

    def damage(self, name: str, change: Callable[[bytes], bytes | None]) -> None:
        path = f"{self.commit.folder}/{name}"
        data = change(self.store.bucket.objects.pop(path))
        if data is not None:
            self.store.bucket.objects[path] = data

    def read_all(self) -> None:
        manifests = read_manifests(self.store, self.commit, patience=IMPATIENT)
        reader = BlockReader(self.store, manifests, patience=IMPATIENT)
        for manifest in manifests:
            for record in manifest.objects:
                reader.read_verified(record.path, 0, record.size_bytes)


@pytest.fixture
def saved() -> Saved:
    store = MemoryStore()
    log = Log(store)
    claim = log.begin()
    other, own = (write_checkpoint(store, *order(rank)) for rank in (1, 0))
    finished = finish_checkpoint(store, own, [other.make_ref()])
    commit = log.commit(
        claim, step=10, folder=own.folder, size_bytes=finished.size_bytes, manifest=finished.manifest
    )
    return Saved(store, finished, commit)


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


OBJECTS = ("__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.0.json", "manifest.1.json")


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param(flip(0), "crc32c", id="the first byte"),
        pytest.param(flip(100), "crc32c", id="the hundredth byte"),
        pytest.param(lambda data: data[:-1], "bytes instead of", id="cut"),
        pytest.param(lambda data: None, "is missing", id="missing"),
        pytest.param(lambda data: data + b"x", "bytes instead of", id="longer"),
    ],
)
def test_damage_is_seen_right_after_the_save(
    saved: Saved, name: str, change: Callable[[bytes], bytes | None], complaint: str
) -> None:
    verify_objects(saved.store, saved.finished)
    saved.damage(name, change)
    with pytest.raises(VerifyError, match=f"{name}.*{complaint}"):
        verify_objects(saved.store, saved.finished, patience=IMPATIENT)


def test_bytes_that_went_bad_on_the_way_are_read_afresh(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = saved.store.read

    def noisy(path: str, offset: int = 0, length: int | None = None) -> bytes:
        reads.append(path)
        data = read(path, offset, length)
        return flip(5)(data) if reads.count(path) <= 2 else data

    monkeypatch.setattr(saved.store, "read", noisy)
    saved.read_all()
    assert {reads.count(path) for path in reads if "manifest.1" not in path} == {3}


NO_ANSWER = TransientStorageError("503")


@pytest.mark.parametrize(
    ("path", "raised", "becomes", "says"),
    [
        ("", NO_ANSWER, TransientStorageError, "503"),
        ("", StorageError("permission denied"), StorageError, "permission denied"),
        (
            "__0_0",
            MissingObjectError("x"),
            TransientStorageError,
            r"__0_0\.distcp is listed, but isn't found",
        ),
    ],
)
def test_an_error_of_the_store_condemns_nothing(
    saved: Saved, path: str, raised: Exception, becomes: type[Exception], says: str
) -> None:
    saved.store.hook = at("before read", raised, path=path)
    with pytest.raises(becomes, match=says) as error:
        saved.read_all()
    assert type(error.value) is becomes


def test_a_failed_write_fails_the_save_and_is_retried_first() -> None:
    store = MemoryStore(hook=at("before write", NO_ANSWER, times=2))
    write_checkpoint(store, *order(1), patience=IMPATIENT)
    store.hook = at("before write", StorageError(28, "no space"))
    with pytest.raises(StorageError, match="no space"):
        write_checkpoint(store, *order(0), patience=IMPATIENT)


def test_ranks_that_do_not_fit_together_are_no_checkpoint() -> None:
    store = MemoryStore()
    save, data = order(1)
    other = write_checkpoint(store, save, data)
    own = write_checkpoint(store, *order(0))
    with pytest.raises(ManifestError, match="ranks \\[0\\] of 2"):
        finish_checkpoint(store, own, [])
    with pytest.raises(TornCheckpointError, match=r"manifest\.1\.json"):
        finish_checkpoint(store, own, [replace(other.make_ref(), crc32c=1)], patience=IMPATIENT)
    half = write_checkpoint(
        store, replace(save, nonce="cd" * 16, structure=Structure(tensors=save.tensors[1:])), data
    )
    with pytest.raises(ManifestError, match="'w' has 48 elements, but its 1 chunks at 1 offsets have 32"):
        finish_checkpoint(store, replace(own, nonce="cd" * 16), [half.make_ref()])


@pytest.mark.parametrize("aliases", [{"v": "nothing"}, {"s": "w"}])
def test_a_further_name_of_nothing_or_of_another_tensor_is_refused(aliases: dict[str, str]) -> None:
    store = MemoryStore()
    other = write_checkpoint(store, *order(1))
    own = write_checkpoint(store, *order(0, aliases=aliases))
    with pytest.raises(ManifestError, match="tied tensor"):
        finish_checkpoint(store, own, [other.make_ref()])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *((each, "here is no manifest") for each in (b"", b"{}", b"[]", b"\xff")),
        (b'{"format":9,"block_bytes":16777216}', "here has format 9"),
        (b'{"format":1,"block_bytes":1}', "blocks of 1 bytes"),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Manifest.from_json(data, "here")
    with pytest.raises(ManifestError, match="here is no manifest"):
        split_inventory(data, "here")


def test_shardings_are_in_rank_0s_manifest_under_every_name_of_a_tensor() -> None:
    text = "{devices=[4,1]0,1,2,3}"
    # The names look like the keys at which a manifest is cut.
    shardings = Shardings(n_devices=4, by_name={"w": text, "tensors": text, ',"tensors":[': "{replicated}"})
    manifests = []
    for rank in (0, 1):
        save, data = order(rank, aliases={"tied": "w"})
        structure = Structure(tensors=save.tensors, aliases={"tied": "w"}, shardings=shardings)
        assert Structure.from_text(structure.text) == structure
        written = write_checkpoint(MemoryStore(), replace(save, structure=structure), data)
        heading, inventory = split_inventory(written.to_json(), "here")
        assert Manifest.from_json(heading, "here").shardings == written.shardings
        assert inventory == written.inventory.encoded
        manifests.append(Manifest.from_json(written.to_json(), "here"))
    assert [manifest.shardings for manifest in manifests] == [shardings, Shardings()]
    assert Contents.from_manifests(manifests).shardings == replace(
        shardings, by_name={**shardings.by_name, "tied": text}
    )


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it starts, and how long it is, along each axis."""


def manifest(rank: int, shape: tuple[int, ...], *boxes: Box) -> Manifest:
    chunks = tuple(
        ChunkRecord(
            offsets=offsets, sizes=sizes, path="p", offset_bytes=0, length_bytes=1, data_offset_bytes=0
        )
        for offsets, sizes in boxes
    )
    tensor = TensorRecord(fqn="w", dtype="float32", global_shape=shape, chunks=chunks)
    return Manifest(
        rank=rank,
        world_size=2,
        step=1,
        claim=0,
        nonce="n",
        objects=(),
        inventory=Inventory(tensors=(tensor,)),
    )


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        pytest.param(
            (10,), [((0,), (4,)), ((3,), (4,)), ((8,), (2,))], id="a gap as long as what is there twice"
        ),
        pytest.param((4, 4), [((0, 0), (2, 4)), ((1, 1), (2, 4))], id="outside"),
        pytest.param((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))], id="rows twice"),
        pytest.param((4,), [((0,), (3,))], id="a gap"),
        pytest.param((4,), [((0, 0), (4, 1))], id="of another number of axes"),
    ],
)
def test_chunks_that_dont_tile_are_refused(shape: tuple[int, ...], boxes: list[Box]) -> None:
    with pytest.raises(ManifestError, match=r"'w'.*don't fit together"):
        merge_tensors([manifest(rank, shape, *boxes[rank::2]) for rank in range(2)])


def test_chunks_that_tile_are_taken() -> None:
    pinwheel: list[Box] = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    (tensor,) = merge_tensors([manifest(r, (3, 3), *pinwheel[r::2]) for r in range(2)]).values()
    assert len(tensor.chunks) == 5
    for shape in ((), (0,), (3, 0)):
        assert merge_tensors([manifest(0, shape, ((0,) * len(shape), shape))])
