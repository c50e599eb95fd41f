"""Deletion and garbage: the log first, pins then, and nothing that isn't ours."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stepkeeper.checkpoint.manifest import checkpoint_folder
from stepkeeper.log import Claim, CommitRecord, Log, ManifestRef
from stepkeeper.retention.garbage import Garbage, gc, sweep
from stepkeeper.retention.pins import Pin, put_pin, remove_pin
from stepkeeper.storage.base import Store, StreamedStore
from stepkeeper.storage.memory import MemoryBucket, MemoryStore, Operation
from stepkeeper.storage.posix import PosixStore

REF = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)


def save(log: Log, store: Store, claim: Claim, step: int, *, committed: bool = True) -> str:
    folder = checkpoint_folder(step, claim.slot, f"{step:032x}")
    store.write(f"{folder}/__0_0.distcp", [b"data"])
    store.write(f"{folder}/.metadata", [b"data"])
    if committed:
        log.commit(claim, step=step, folder=folder, size_bytes=8, manifest=REF)
    return folder


def delete(log: Log, claim: Claim, step: int) -> Garbage:
    (record,) = log.delete(claim, lambda state: [r.slot for r in state.live if r.step == step])
    return garbage_of(record)


def garbage_of(record: CommitRecord) -> Garbage:
    return Garbage(folder=record.folder, slot=record.slot)


def pin(store: Store, slot: int) -> Pin:
    pin = Pin(slot=slot, nonce=f"{slot:032x}", holder="an evaluation")
    put_pin(store, pin)
    return pin


def folders(bucket: MemoryBucket) -> set[str]:
    found = {path.rpartition("/")[0] for path in bucket.objects}
    return {folder for folder in found if not folder.startswith(".stepkeeper")}


def collected(garbage: Sequence[Garbage]) -> list[str]:
    return [each.folder for each in garbage]


def test_what_was_deleted_loses_its_data() -> None:
    store = MemoryStore()
    log = Log(store)
    claim = log.begin()
    saved = [save(log, store, claim, step) for step in (10, 20, 30)]
    assert sweep(store, [delete(log, claim, 10)]) == ()
    assert folders(store.bucket) == set(saved[1:])


def test_sweeping_nothing_asks_the_store_nothing() -> None:
    asked: list[str] = []
    store = MemoryStore(hook=lambda moment, operation, path: asked.append(operation))
    assert sweep(store, []) == ()
    assert asked == []


def test_what_is_pinned_keeps_its_data_until_its_last_pin_is_gone() -> None:
    store = MemoryStore()
    log = Log(store)
    claim = log.begin()
    pinned, _, head = (save(log, store, claim, step) for step in (10, 20, 30))
    pins = [pin(store, 1), Pin(slot=1, nonce="f" * 32, holder="a fork")]
    put_pin(store, pins[1])
    deleted = [delete(log, claim, 10), delete(log, claim, 20)]
    left = sweep(store, deleted)
    assert left == (deleted[0],)
    assert folders(store.bucket) == {pinned, head}
    remove_pin(store, pins[0])
    assert sweep(store, left) == left
    remove_pin(store, pins[1])
    assert sweep(store, left) == ()
    assert folders(store.bucket) == {head}


def test_a_pin_that_cannot_be_read_holds_all_the_same() -> None:
    store = MemoryStore()
    log = Log(store)
    claim = log.begin()
    kept, _ = save(log, store, claim, 10), save(log, store, claim, 20)
    store.write(f".stepkeeper/pins/00000001-{'a' * 32}", [b"what a later release writes"])
    deleted = delete(log, claim, 10)
    assert sweep(store, [deleted]) == (deleted,)
    assert kept in folders(store.bucket)


def test_garbage_of_earlier_claims_goes_and_nothing_else() -> None:
    store = MemoryStore()
    log = Log(store)
    first = log.begin()
    kept, torn = save(log, store, first, 10), save(log, store, first, 20, committed=False)
    bad = save(log, store, first, 30)
    log.quarantine(first, log.state.tail, "a bad block")
    later = log.begin()
    mine = save(log, store, later, 40, committed=False)
    of_a_later_claim = checkpoint_folder(50, later.slot + 3, "a" * 32)
    alien = [
        "10/.metadata",
        "10/0/x",
        "20/0-short/x",
        "notes/0-" + "a" * 32 + "/x",
        "007/0-" + "a" * 32 + "/x",
    ]
    for path in (*alien, f"{of_a_later_claim}/x"):
        store.write(path, [b"not ours, or not ours to take"])
    report = gc(log, store)
    assert report.collected == (Garbage(folder=torn, n_objects=2, size_bytes=8),)
    assert report.pinned == ()
    left = {path for path in store.bucket.objects if not path.startswith(".stepkeeper/")}
    assert {path.rpartition("/")[0] for path in left if path not in alien} == {
        kept,
        bad,
        mine,
        of_a_later_claim,
    }
    assert left >= set(alien)


def test_a_file_that_is_not_ours_stays_wherever_it_is(tmp_path: Path) -> None:
    """On a disk anybody can put a file, with any name, where a save was."""
    store = PosixStore(tmp_path)
    log = Log(store)
    claim = log.begin()
    superseded, head = save(log, store, claim, 10), save(log, store, claim, 20)
    garbage = save(log, store, claim, 30, committed=False)
    copied = checkpoint_folder(40, claim.slot, "a" * 32)
    (tmp_path / copied).mkdir(parents=True)
    names = ("manifest (copy).json", "__0_0.distcp.bak", "notes\n.txt", "manifest.\u0663.json")
    users = {f"{folder}/{name}" for folder in (superseded, garbage, copied) for name in names}
    for path in users:
        (tmp_path / path).write_text("a user's")
    sweep(store, [delete(log, claim, 10)])
    log.begin()
    assert collected(gc(log, store).collected) == [garbage]
    assert gc(log, store).collected == ()
    left = {stat.path for stat in store.list("") if not stat.path.startswith(".stepkeeper/")}
    assert left == users | {f"{head}/__0_0.distcp", f"{head}/.metadata"}


def test_data_of_a_deletion_cut_short_is_garbage_once_a_later_claim_has_begun() -> None:
    store = MemoryStore()
    log = Log(store)
    claim = log.begin()
    first, second = save(log, store, claim, 10), save(log, store, claim, 20)
    delete(log, claim, 10)
    assert gc(log, store).collected == ()
    log.begin()
    assert collected(gc(log, store).collected) == [first]
    assert folders(store.bucket) == {second}


def test_pinned_garbage_waits_for_a_collection_after_the_pin() -> None:
    store = MemoryStore()
    log = Log(store)
    claim = log.begin()
    first, second = save(log, store, claim, 10), save(log, store, claim, 20)
    torn = save(log, store, claim, 30, committed=False)
    delete(log, claim, 10)
    held = pin(store, 1)
    live, nothing = pin(store, 2), pin(store, 77)
    log.begin()
    report = gc(log, store)
    assert collected(report.collected) == [torn]
    assert report.pinned == (Garbage(folder=first, slot=1, n_objects=2, size_bytes=8),)
    assert folders(store.bucket) == {first, second}
    remove_pin(store, held)
    assert collected(gc(log, store).collected) == [first]
    assert folders(store.bucket) == {second}
    assert {path for path in store.bucket.objects if "pins" in path} == {
        f".stepkeeper/pins/{each.slot:08d}-{each.nonce}" for each in (live, nothing)
    }


def test_a_dry_run_only_tells() -> None:
    store = MemoryStore()
    log = Log(store)
    torn = save(log, store, log.begin(), 10, committed=False)
    log.begin()
    before = dict(store.bucket.objects)
    assert collected(gc(log, store, dry_run=True).collected) == [torn]
    assert store.bucket.objects == before


def test_anybody_can_collect_beside_a_process_that_saves() -> None:
    store = MemoryStore()
    log = Log(store)
    torn = save(log, store, log.begin(), 10, committed=False)
    claim = log.begin()
    mine = save(log, store, claim, 20, committed=False)
    assert collected(gc(Log(store), store).collected) == [torn]
    assert folders(store.bucket) == {mine}
    assert gc(Log(MemoryStore()), MemoryStore()) == gc(Log(store), store)


def test_what_proofs_left_goes_once_a_later_claim_has_begun() -> None:
    store = MemoryStore()
    log = Log(store)
    log.begin()
    log.begin()
    over = [f".stepkeeper/probes/{number:08d}-{'a' * 32}" for number in (0, 1)]
    over += [f".stepkeeper/probes/create-00000001-{'b' * 32}"]
    stays = [
        f".stepkeeper/probes/00000002-{'a' * 32}",
        f".stepkeeper/probes/create-00000002-{'a' * 32}",
        ".stepkeeper/probes/00000000-theirs",
        f".stepkeeper/probes/{'a' * 32}",
        f"probes/00000000-{'a' * 32}",
    ]
    for path in over + stays:
        store.write(path, [b"x"])
    report = gc(log, store, dry_run=True)
    assert sorted(report.remnants) == sorted(over)
    assert set(over) <= set(store.bucket.objects)
    assert gc(log, store) == report
    assert not set(over) & set(store.bucket.objects)
    assert set(stays) <= set(store.bucket.objects)
    assert gc(log, store).remnants == ()


def test_what_puts_left_in_a_folder_goes_once_they_could_only_lose(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    log = Log(store)
    claim = log.begin()
    save(log, store, claim, 10)
    delete(log, claim, 10)
    save(log, store, claim, 20)
    names = {
        "log/00000003.json": True,
        "log/00000004.json": False,
        f"pins/00000001-{'b' * 32}": True,
        f"pins/00000003-{'b' * 32}": False,
        f"pins/00000005-{'b' * 32}": False,
        f"probes/00000000-{'b' * 32}": True,
        f"probes/00000001-{'b' * 32}": False,
        "log/somebody": False,
    }
    files = {}
    for target, over in names.items():
        folder, _, name = target.partition("/")
        (tmp_path / ".stepkeeper" / folder).mkdir(exist_ok=True)
        file = tmp_path / ".stepkeeper" / folder / f".tmp-{name}-{'c' * 32}"
        file.write_bytes(b"half")
        files[file] = over
    alien = tmp_path / "20" / f".tmp-00000000.json-{'c' * 32}"
    alien.write_bytes(b"not ours")
    assert len(gc(log, store, dry_run=True).remnants) == 3
    assert all(file.exists() for file in files)
    assert len(gc(log, store).remnants) == 3
    assert {file: not file.exists() for file in files} == files
    assert alien.exists()


class Streamed:
    """A store in memory that takes four uploads at once, and so two deletions."""

    streams = 4

    def __init__(self, store: MemoryStore) -> None:
        self.uri = store.uri
        self.put_if_absent = store.put_if_absent
        self.write = store.write
        self.read = store.read
        self.list = store.list
        self.delete = store.delete
        self.close = store.close


def test_where_many_requests_at_once_are_fast_objects_are_deleted_so_but_metadata_first() -> None:
    deleted: list[str] = []
    both = threading.Barrier(2)

    def hook(moment: Literal["before", "after"], operation: Operation, path: str) -> None:
        if operation == "delete" and moment == "before" and path.endswith(".distcp"):
            # One after the other they would wait for ever.
            both.wait(60)
        elif operation == "delete" and moment == "after":
            deleted.append(path.rpartition("/")[2])

    memory = MemoryStore()
    store = Streamed(memory)
    assert isinstance(store, StreamedStore)
    log = Log(store)
    claim = log.begin()
    doomed, head = (save(log, store, claim, step) for step in (10, 20))
    for name in ("__0_1.distcp", "manifest.0.json", "theirs.txt"):
        store.write(f"{doomed}/{name}", [b"data"])
    garbage = delete(log, claim, 10)
    memory.hook = hook
    assert sweep(store, [garbage]) == ()
    assert (deleted[0], len(deleted)) == (".metadata", 4)
    assert folders(memory.bucket) == {doomed, head}
    assert [path for path in memory.bucket.objects if path.startswith(doomed)] == [f"{doomed}/theirs.txt"]
