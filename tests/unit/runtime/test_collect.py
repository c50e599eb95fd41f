"""Deletion and garbage: the log first, and nothing that isn't ours."""

from pathlib import Path

from stepkeeper.collect import collect_garbage, delete_superseded
from stepkeeper.contract import Retention
from stepkeeper.log import Claim, Log, ManifestRef
from stepkeeper.manifest import checkpoint_folder
from stepkeeper.storage.base import Store
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.posix import PosixStore

REF = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)


def save(log: Log, store: Store, claim: Claim, step: int, *, committed: bool = True) -> str:
    folder = checkpoint_folder(step, claim.slot, f"{step:032x}")
    store.write(f"{folder}/__0_0.distcp", [b"data"])
    store.write(f"{folder}/.metadata", [b"data"])
    if committed:
        log.commit(claim, step=step, folder=folder, size_bytes=8, manifest=REF)
    return folder


def folders(bucket: MemoryBucket) -> set[str]:
    return {path.rpartition("/")[0] for path in bucket.objects} - {".stepkeeper/log"}


def test_superseded_commits_lose_entry_and_data() -> None:
    store = MemoryStore()
    log = Log(store)
    claim = log.begin()
    saved = [save(log, store, claim, step) for step in (10, 20, 30)]
    verified = [record.slot for record in log.state.live]
    deleted = delete_superseded(log, store, claim, Retention(last=2), verified)
    assert [record.folder for record in deleted] == saved[:1]
    assert folders(store.bucket) == set(saved[1:])
    assert [record.folder for record in log.state.live] == saved[1:]


def test_the_log_knows_before_data_goes() -> None:
    store = MemoryStore()
    log = Log(store)
    claim = log.begin()
    saved = [save(log, store, claim, step) for step in (10, 20)]
    verified = [record.slot for record in log.state.live]
    seen: list[set[str]] = []

    def hook(moment: str, operation: str, path: str) -> None:
        if operation == "delete":
            seen.append({record.folder for record in Log(MemoryStore(store.bucket)).open().live})

    store.hook = hook
    delete_superseded(log, store, claim, Retention(last=1), verified)
    assert seen
    assert all(live == {saved[1]} for live in seen)


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
    assert collect_garbage(log, store, later) == (torn,)
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
    verified = [record.slot for record in log.state.live]
    delete_superseded(log, store, claim, Retention(last=1), verified)
    later = log.begin()
    assert collect_garbage(log, store, later) == (garbage,)
    assert collect_garbage(log, store, later) == ()
    left = {stat.path for stat in store.list("") if not stat.path.startswith(".stepkeeper/")}
    assert left == users | {f"{head}/__0_0.distcp", f"{head}/.metadata"}


def test_data_of_a_deletion_cut_short_is_garbage_for_the_next_claim() -> None:
    store = MemoryStore()
    log = Log(store)
    claim = log.begin()
    first, second = save(log, store, claim, 10), save(log, store, claim, 20)
    log.delete(claim, lambda state: [state.line[-1].slot])
    assert collect_garbage(log, store, claim) == ()
    assert collect_garbage(log, store, log.begin()) == (first,)
    assert folders(store.bucket) == {second}
