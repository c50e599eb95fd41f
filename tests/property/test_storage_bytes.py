"""Every byte of a root, damaged, and every object cut, lost or joined by a stranger: it is said of which one."""

from collections.abc import Mapping
from typing import Final

import pytest

from stepkeeper.checkpoint.reading import BlockReader, read_manifests
from stepkeeper.cli.blocks import verify_commit
from stepkeeper.errors import LogFormatError, PinFormatError, TornCheckpointError
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.log.tail import slot_path
from stepkeeper.retention.garbage import gc
from stepkeeper.retention.pins import Pin, list_pins, pin_path, pinned_slots, put_pin
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.memory import MemoryBucket, MemoryStore

IMPATIENT: Final = Patience(total_s=0.0, sleep=lambda _: None)
PIN: Final = Pin(slot=1, nonce="a" * 32, holder="an evaluation", reason="reads")
OBJECTS: Final = ("__0_0.distcp", "__1_0.distcp", "manifest.0.json", "manifest.1.json", ".metadata")


@pytest.fixture(scope="module")
def whole() -> Mapping[str, bytes]:
    """A root with two commits by two ranks, an entry of each kind after the last index, and a pin."""
    root = SmallRoot()
    root.begin()
    root.save(10, world_size=2)
    root.save(20, world_size=2)
    root.save(30, world_size=2)
    root.begin(1)
    root.log.mark_restored(root.claim, 3)
    root.save(40, world_size=2)
    root.log.void(root.claim, "given up", f"50/4-{'d' * 32}")
    root.log.delete(root.claim, lambda state: [2])
    root.log.quarantine(root.claim, 1, "read bad")
    put_pin(root.store, PIN)
    return root.contents()


def store_of(objects: Mapping[str, bytes]) -> MemoryStore:
    bucket = MemoryBucket()
    bucket.objects.update(objects)
    return MemoryStore(bucket)


def opened(objects: Mapping[str, bytes]) -> LogState:
    return Log(store_of(objects), patience=IMPATIENT).open()


def log_paths(objects: Mapping[str, bytes]) -> list[str]:
    """Return the paths of the entries that opening the log needs."""
    paths = sorted(path for path in objects if path.startswith(".stepkeeper/log/"))
    return paths[opened(objects).index :]


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def newest(objects: Mapping[str, bytes]) -> tuple[MemoryStore, CommitRecord]:
    latest = opened(objects).latest
    assert latest is not None
    return store_of(objects), latest


def bad_objects(objects: Mapping[str, bytes]) -> set[str]:
    """Return the bad objects, as `stepkeeper verify` names them."""
    store, latest = newest(objects)
    return {each.name for each in verify_commit(store, latest, patience=IMPATIENT).bad}


def read_all(objects: Mapping[str, bytes]) -> None:
    store, latest = newest(objects)
    manifests = read_manifests(store, latest, patience=IMPATIENT)
    reader = BlockReader(store, manifests, patience=IMPATIENT)
    for manifest in manifests:
        for record in manifest.objects:
            reader.read_verified(record.path, 0, record.size_bytes)


def test_a_flipped_bit_in_any_byte_of_an_entry_is_seen_when_the_log_is_opened(
    whole: Mapping[str, bytes],
) -> None:
    assert len(log_paths(whole)) >= 5
    for path in log_paths(whole):
        n_bits = 8 * len(whole[path])
        # One in each byte, and all of the checksum and its key.
        bits = [*range(0, n_bits - 240, 9), *range(n_bits - 240, n_bits)]
        cut = (whole[path][:length] for length in range(len(whole[path])))
        for bad in (*(flipped(whole[path], bit) for bit in bits), *cut):
            with pytest.raises(LogFormatError, match=path):
                opened({**whole, path: bad})


@pytest.mark.parametrize("name", OBJECTS)
def test_a_flipped_bit_anywhere_in_an_object_is_seen(whole: Mapping[str, bytes], name: str) -> None:
    path = f"{newest(whole)[1].folder}/{name}"
    for place in range(0, len(whole[path]), 3):
        objects = {**whole, path: flipped(whole[path], 8 * place + place % 8)}
        with pytest.raises(TornCheckpointError, match=name):
            read_all(objects)
        if place % 48 == 0:
            assert bad_objects(objects) == {name}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_is_cut_longer_or_gone_is_seen(whole: Mapping[str, bytes], name: str) -> None:
    path = f"{newest(whole)[1].folder}/{name}"
    without = {other: data for other, data in whole.items() if other != path}
    for data in (b"", whole[path][:-1], whole[path][: len(whole[path]) // 2], None):
        objects = without if data is None else {**whole, path: data}
        with pytest.raises(TornCheckpointError, match=name):
            read_all(objects)
        assert bad_objects(objects) == {name}
    assert bad_objects({**whole, path: whole[path] + b"x"}) == {name}


def test_another_commits_object_in_the_same_place_is_seen(whole: Mapping[str, bytes]) -> None:
    state = opened(whole)
    newest, older = (state.commits[slot].folder for slot in (state.head, 3) if slot is not None)
    # The tensors are where they were: `.metadata` is the same in both.
    for name in OBJECTS[:-1]:
        with pytest.raises(TornCheckpointError, match=name):
            read_all({**whole, f"{newest}/{name}": whole[f"{older}/{name}"]})


@pytest.mark.parametrize(
    "path",
    [
        "{folder}/notes.txt",
        "{folder}/__9_0.distcp",
        ".stepkeeper/log/README",
        ".stepkeeper/log/00000002.json.bak",
        ".stepkeeper/pins/README",
        ".stepkeeper/pins/00000002-short",
        f".stepkeeper/probes/{'c' * 32}",
        ".stepkeeper/notes",
        "model.pt",
        "40/model.pt",
    ],
)
def test_a_strangers_file_is_in_nobodys_way(whole: Mapping[str, bytes], path: str) -> None:
    alien = path.format(folder=newest(whole)[1].folder)
    objects = {**whole, alien: b"a stranger's"}
    assert opened(objects) == opened(whole)
    read_all(objects)
    store, latest = newest(objects)
    found = verify_commit(store, latest, patience=IMPATIENT)
    name = alien.removeprefix(f"{latest.folder}/")
    assert (found.bad, found.unlisted) == ((), (name,) if name != alien else ())
    assert list_pins(store, patience=IMPATIENT) == [PIN]
    gc(Log(store, patience=IMPATIENT), store, patience=IMPATIENT)
    Log(store, patience=IMPATIENT).begin(take_over=True)
    assert store.bucket.objects[alien] == b"a stranger's"


@pytest.mark.parametrize("data", [b"", b"{}", b"a stranger's"])
def test_a_stranger_in_the_next_slot_is_refused_and_named(whole: Mapping[str, bytes], data: bytes) -> None:
    path = slot_path(opened(whole).tail + 1)
    with pytest.raises(LogFormatError, match=path):
        opened({**whole, path: data})


def test_a_pin_that_is_cut_or_damaged_holds_and_one_that_is_gone_does_not(whole: Mapping[str, bytes]) -> None:
    path, data = pin_path(PIN.slot, PIN.nonce), whole[pin_path(PIN.slot, PIN.nonce)]
    refused = 0
    for bad in (*(data[:n] for n in range(len(data))), *(flipped(data, bit) for bit in range(8 * len(data)))):
        store = store_of({**whole, path: bad})
        assert pinned_slots(store, patience=IMPATIENT) == {PIN.slot}
        try:
            (pin,) = list_pins(store, patience=IMPATIENT)
        except PinFormatError:
            refused += 1
        else:
            # What is left to be wrong is for people: who holds it, and why.
            assert (pin.slot, pin.nonce) == (PIN.slot, PIN.nonce)
    assert refused > len(data)
    assert pinned_slots(store_of({p: d for p, d in whole.items() if p != path}), patience=IMPATIENT) == set()
