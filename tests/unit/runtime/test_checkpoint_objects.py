"""A checkpoint written by two ranks and read back: every byte verified, every kind of damage named."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from stepkeeper.checkpoint.blocks import Contents
from stepkeeper.checkpoint.finishing import FinishedCheckpoint, finish_checkpoint, verify_objects
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


def test_what_was_written_is_read(saved: Saved) -> None:
    manifests = read_manifests(saved.store, saved.commit)
    assert tuple(each for m in manifests for each in m.objects) == saved.finished.objects
    reader = BlockReader(saved.store, manifests)
    chunks = [chunk for m in manifests for t in m.tensors if t.fqn == "w" for chunk in t.chunks]
    found = [
        reader.read_verified(chunk.path, chunk.offset_bytes + chunk.data_offset_bytes, chunk.sizes[0] * 32)
        for chunk in chunks
    ]
    assert b"".join(found) == b"".join(ROWS)
    (value,) = manifests[0].values
    assert reader.read_verified(value.path, value.offset_bytes, value.length_bytes) == VALUE


def test_rank_0s_manifest_lists_all_that_no_other_does(saved: Saved) -> None:
    names = {record.path for record in read_manifests(saved.store, saved.commit)[0].objects}
    assert names == {"__0_0.distcp", ".metadata", "manifest.1.json"}
    stored = {path for path in saved.store.bucket.objects if path.startswith(saved.commit.folder)}
    assert len(stored) == len(names) + 2
    assert saved.finished.size_bytes == sum(len(saved.store.bucket.objects[path]) for path in stored)
    verify_objects(saved.store, saved.finished)


OBJECTS = ("__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.0.json", "manifest.1.json")


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize(
    ("change", "complaint", "is_torn"),
    [
        pytest.param(flip(0), "crc32c", True, id="the first byte"),
        pytest.param(flip(100), "crc32c", True, id="the hundredth byte"),
        pytest.param(lambda data: data[:-1], "bytes instead of", True, id="cut"),
        pytest.param(lambda data: None, "is missing", True, id="missing"),
        pytest.param(lambda data: data + b"x", "bytes instead of", False, id="longer: nothing reads that"),
    ],
)
def test_damage_is_seen_right_after_the_save_and_when_it_is_read(
    saved: Saved, name: str, change: Callable[[bytes], bytes | None], complaint: str, is_torn: bool
) -> None:
    saved.read_all()
    saved.damage(name, change)
    with pytest.raises(VerifyError, match=f"{name}.*{complaint}"):
        verify_objects(saved.store, saved.finished, patience=IMPATIENT)
    if is_torn or name.startswith("manifest"):
        with pytest.raises(TornCheckpointError, match=name):
            saved.read_all()


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
    with pytest.raises(ManifestError, match="'w' has 48 elements, its 1 chunks at 1 places have 32"):
        finish_checkpoint(store, replace(own, nonce="cd" * 16), [half.make_ref()])


def test_data_that_ends_too_early_is_refused() -> None:
    """Also that of a value, which is the last."""
    store = MemoryStore()
    save, data = order(0)
    for size in (100, len(data) - 1):
        with pytest.raises(ValueError, match=r"bytes from .* on, got"):
            write_checkpoint(store, save, data[:size])
    assert not store.bucket.objects


def test_a_manifest_survives_json_and_may_say_less() -> None:
    manifest = write_checkpoint(MemoryStore(), *order(0, aliases={"v": "w"}))
    assert Manifest.from_json(manifest.to_json(), "here") == manifest
    plain = write_checkpoint(MemoryStore(), *order(0))
    raw = json.loads(plain.to_json())
    assert "shardings" not in raw
    del raw["aliases"]
    assert Manifest.from_json(json.dumps(raw).encode(), "here") == plain


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
        (b"{}", "here is no manifest"),
        (b"[]", "here is no manifest"),
        (b"\xff", "here is no manifest"),
        (b'{"format":9,"block_bytes":16777216}', "here has format 9"),
        (b'{"format":1,"block_bytes":1}', "blocks of 1 bytes"),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Manifest.from_json(data, "here")


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
