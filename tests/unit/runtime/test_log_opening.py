"""Opening the log: what it costs, and what is not taken for a log."""

import pytest

from stepkeeper.errors import LogFormatError, LogGapError
from stepkeeper.log import Claim, Log, ManifestRef
from stepkeeper.log.log import slot_path
from stepkeeper.storage.memory import MemoryBucket, MemoryStore

REF = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def log(bucket: MemoryBucket) -> Log:
    return Log(MemoryStore(bucket))


def commit(log: Log, claim: Claim, step: int) -> None:
    folder = f"{step}/{claim.slot}-{log.state.tail:032x}"
    log.commit(claim, step=step, folder=folder, size_bytes=10, manifest=REF)


def test_opening_reads_a_bounded_number_of_entries(log: Log, bucket: MemoryBucket) -> None:
    claim = log.begin()
    for step in range(100):
        commit(log, claim, step)
    reads: list[str] = []

    def hook(moment: str, operation: str, path: str) -> None:
        if moment == "before":
            reads.append(operation)

    state = Log(MemoryStore(bucket, hook=hook)).open()
    assert state == log.state
    assert reads.count("list") == 1
    assert reads.count("read") <= 18


def test_a_gap_is_refused_and_named(log: Log, bucket: MemoryBucket) -> None:
    claim = log.begin()
    for step in range(5):
        commit(log, claim, step)
    del bucket.objects[slot_path(2)]
    with pytest.raises(LogGapError, match=r"00000002\.json is gone, later slots are there"):
        Log(MemoryStore(bucket)).open()


def test_a_slot_that_came_during_the_listing_is_no_gap(log: Log, bucket: MemoryBucket) -> None:
    claim = log.begin()
    for step in range(3):
        commit(log, claim, step)
    hidden = bucket.objects.pop(slot_path(2))

    def hook(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("after", "list"):
            bucket.objects[slot_path(2)] = hidden

    assert Log(MemoryStore(bucket, hook=hook)).open() == log.state


def test_files_that_are_no_slots_are_no_business_of_the_log(log: Log, bucket: MemoryBucket) -> None:
    log.begin()
    bucket.objects[".stepkeeper/log/README.txt"] = b"hands off"
    assert Log(MemoryStore(bucket)).open() == log.state


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"format":1', b'"format":2', "has format 2, this stepkeeper knows 1"),
        (b'"kind":"void"', b'"kind":"vote"', "is of the unknown kind 'vote'; known: begin, "),
        (b'"after"', b'"afterwards"', "unknown key 'afterwards'"),
        (b'"claim":0,"index"', b'"claim":1,"index"', "slot 1 says"),
        (b"{", b"[", "is no entry of the log"),
    ],
)
def test_an_entry_that_says_something_else_is_refused(
    log: Log, bucket: MemoryBucket, old: bytes, new: bytes, message: str
) -> None:
    claim = log.begin()
    log.void(claim, "nothing to save", "10/0-x")
    path = slot_path(1)
    assert old in bucket.objects[path]
    bucket.objects[path] = bucket.objects[path].replace(old, new, 1)
    with pytest.raises(LogFormatError, match=message):
        Log(MemoryStore(bucket)).open()


def test_an_entry_of_a_stale_claim_in_the_log_is_refused(log: Log, bucket: MemoryBucket) -> None:
    claim = log.begin()
    commit(log, claim, 10)
    early = bucket.objects.pop(slot_path(1))
    again = Log(MemoryStore(bucket))
    again.begin()
    bucket.objects[slot_path(2)] = early
    with pytest.raises(LogFormatError, match="slot 2 is of claim 0, but claim 1 owns the log there"):
        again.refresh()
