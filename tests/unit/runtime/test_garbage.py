"""Test deletion and garbage: the log goes first, pins hold, and other writers' files stay."""

import pytest
from store_parts.behind import Behind

from stepkeeper.checkpoint.manifest import checkpoint_folder
from stepkeeper.log import Log
from stepkeeper.retention.garbage import Garbage, gc, sweep
from stepkeeper.retention.pins import Pin, put_pin, remove_pin
from stepkeeper.storage.base import StreamedStore
from stepkeeper_testing.checkpoints import SmallRoot, save_small
from stepkeeper_testing.memory import MemoryStore

NONCE = "a" * 32


@pytest.fixture
def root() -> SmallRoot:
    return SmallRoot()


def delete(root: SmallRoot, slot: int) -> Garbage:
    (record,) = root.log.delete(root.claim, lambda state: [slot])
    return Garbage(folder=record.folder, slot=record.slot)


def pin(root: SmallRoot, slot: int, nonce: str = NONCE) -> Pin:
    pin = Pin(slot=slot, nonce=nonce, holder="an evaluation")
    put_pin(root.store, pin)
    return pin


def folders(root: SmallRoot) -> set[str]:
    """The folders of data, by step."""
    return {path.partition("/")[0] for path in root.contents()} - {".stepkeeper"}


def collected(root: SmallRoot, *, dry_run: bool = False) -> list[str]:
    return [each.folder for each in gc(Log(root.store), root.store, dry_run=dry_run).collected]


def test_what_is_pinned_keeps_its_data_until_its_last_pin_is_gone(root: SmallRoot) -> None:
    root.play("begin 10 20 30 40")
    pins = [pin(root, 1), pin(root, 1, "f" * 32)]
    unread = f".stepkeeper/pins/00000003-{NONCE}"
    root.change(unread, b"what a later release writes")
    deleted = [delete(root, 1), delete(root, 2), delete(root, 3)]
    left = sweep(root.store, deleted)
    assert left == (deleted[0], deleted[2])
    assert folders(root) == {"10", "30", "40"}
    remove_pin(root.store, pins[0])
    assert sweep(root.store, left) == left
    remove_pin(root.store, pins[1])
    root.change(unread, None)
    assert sweep(root.store, left) == ()
    assert folders(root) == {"40"}


def test_garbage_of_earlier_claims_goes_and_nothing_else(root: SmallRoot) -> None:
    root.play("begin 10 20 !2")
    torn = root.give_up(30)
    root.play("begin")
    mine = root.give_up(40)
    later = f"{checkpoint_folder(50, root.claim.slot + 3, NONCE)}/x"
    alien = ["10/.metadata", "10/0/x", "20/0-short/x", f"notes/0-{NONCE}/x", f"007/0-{NONCE}/x"]
    for path in (*alien, later):
        root.store.write(path, [b"not ours, or not ours to take"])
    pin(root, 77)  # a slot that the log doesn't have
    before = root.contents()
    assert collected(root, dry_run=True) == [torn]
    assert root.contents() == before
    report = gc(Log(root.store), root.store)
    (found,) = report.collected
    assert (found.folder, found.n_objects, found.slot) == (torn, 1, None)
    assert report.pinned == ()
    assert {*before} - {*root.contents()} == {path for path in before if path.startswith(torn)}
    assert any(path.startswith(mine) for path in root.contents())


def test_what_proofs_left_goes_once_a_later_claim_has_begun(root: SmallRoot) -> None:
    root.play("begin begin")
    over = [f".stepkeeper/probes/{name}-{NONCE}" for name in ("00000000", "00000001", "create-00000001")]
    stays = [
        *(f".stepkeeper/probes/{name}-{NONCE}" for name in ("00000002", "create-00000002")),
        ".stepkeeper/probes/00000000-theirs",
        f".stepkeeper/probes/{NONCE}",
        f"probes/00000000-{NONCE}",
    ]
    for path in over + stays:
        root.store.write(path, [b"x"])
    report = gc(root.log, root.store, dry_run=True)
    assert sorted(report.remnants) == sorted(over)
    assert set(over) <= set(root.contents())
    assert gc(root.log, root.store) == report
    assert not set(over) & set(root.contents())
    assert set(stays) <= set(root.contents())


class Streamed(Behind):
    """A store that takes four uploads at once, and so two deletions."""

    streams = 4


def test_where_many_requests_at_once_are_fast_metadata_is_deleted_before_the_rest_all_the_same() -> None:
    memory, deleted = MemoryStore(), list[str]()
    store = Streamed(memory)
    assert isinstance(store, StreamedStore)
    log = Log(store)
    claim = log.begin()
    doomed, _ = (save_small(log, store, claim, step).folder for step in (10, 20))
    for name in ("__0_1.distcp", "theirs.txt"):
        store.write(f"{doomed}/{name}", [b"data"])
    log.delete(claim, lambda state: [1])
    memory.hook = lambda moment, operation, path: deleted.append(path) if operation == "delete" else None
    assert sweep(store, [Garbage(folder=doomed, slot=1)]) == ()
    assert deleted[:2] == [f"{doomed}/.metadata"] * 2, "before and after"
    assert [path for path in memory.bucket.objects if path.startswith(doomed)] == [f"{doomed}/theirs.txt"]
