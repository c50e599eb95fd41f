"""Test opening the log: its cost, bad bytes, and objects that are no entries."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from store_parts.behind import Behind
from store_parts.damaged_root import IMPATIENT
from typing_extensions import override

from stepkeeper.cli.blocks import verify_commit
from stepkeeper.errors import DamagedEntryError, LogFormatError, LogGapError, TransientStorageError
from stepkeeper.log import Log, LogState, tail
from stepkeeper.log.replay import apply_entry
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.memory import MemoryBucket, MemoryStore

CommitStep = Callable[..., int]


def void(log: Log, n: int) -> None:
    claim = log.begin()
    for step in range(n - 1):
        log.void(claim, "nothing to save", f"{step}/0-x")


@pytest.mark.parametrize("n", [100, 5_000])
def test_opening_costs_the_same_however_long_the_log_is(log: Log, bucket: MemoryBucket, n: int) -> None:
    void(log, n)
    asked: list[str] = []
    store = MemoryStore(bucket, hook=lambda moment, name, path: asked.append(f"{moment} {name}"))
    assert Log(store).open() == log.state
    assert asked.count("before list") <= (1 if n < 1000 else 2)
    assert asked.count("before read") <= 17


@pytest.mark.parametrize("before", [511, 512, 513])
def test_a_milestone_that_came_during_the_listing_is_no_gap(
    log: Log, bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(tail, "PAGE", 100)
    void(log, 600)
    later = {slot_path(slot): bucket.objects.pop(slot_path(slot)) for slot in range(before, 600)}
    pages = []

    def hook(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("before", "list"):
            pages.append(path)
            if len(pages) == 2:
                bucket.objects |= later

    assert Log(MemoryStore(bucket, hook=hook)).open() == log.state
    assert len(pages) >= 2


class Unpaged:
    """A store that lists everything or nothing."""

    def __init__(self, bucket: MemoryBucket) -> None:
        inner = MemoryStore(bucket)
        self.uri = "memory://unpaged"
        self.put_if_absent, self.write, self.read = inner.put_if_absent, inner.write, inner.read
        self.list, self.delete, self.close = inner.list, inner.delete, inner.close


@pytest.mark.parametrize("milestone", [3, 6, 512])
@pytest.mark.parametrize("n_slots", [*range(9), 15, 16, 17, 40, 63, 64, 65])
def test_a_tail_is_found_page_by_page_and_a_gap_before_it_is_refused(
    bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch, n_slots: int, milestone: int
) -> None:
    """A gap in the middle may be a lost entry; a gap at the start is caused by rules that delete old objects."""
    monkeypatch.setattr(tail, "PAGE", 4)
    monkeypatch.setattr(tail, "_MILESTONE", milestone)
    for slot in range(n_slots):
        bucket.objects[slot_path(slot)] = b"an entry"
    for aliens in ((), ("README.txt",), tuple(f"alien{n}" for n in range(9))):
        for name in aliens:
            bucket.objects[f"{tail.LOG_PREFIX}{name}"] = b"hands off"
        assert tail.find_tail(MemoryStore(bucket), DEFAULT_PATIENCE) == n_slots - 1
        assert tail.find_tail(Unpaged(bucket), DEFAULT_PATIENCE) == n_slots - 1
    for missing in {0, 1, 6, n_slots - 2} & {*range(n_slots - 1)}:
        taken = bucket.objects.pop(slot_path(missing))
        with pytest.raises(LogGapError, match=rf"{missing:08d}\.json is gone, but later slots exist"):
            tail.find_tail(MemoryStore(bucket), DEFAULT_PATIENCE)
        bucket.objects[slot_path(missing)] = taken


def sealed(entry: bytes) -> bytes:
    content = entry.rpartition(b',"crc32c":')[0]
    return content + b',"crc32c":%d}' % crc32c(content)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"format":3', b'"format":4', "has format 4, this stepkeeper reads 3"),
        (b'"kind":"void"', b'"kind":"vote"', "is of the unknown kind 'vote'; known: begin, "),
        (b'"after"', b'"afterwards"', "unknown key 'afterwards'"),
        (b'"claim":0,"index"', b'"claim":1,"index"', "slot 1 records"),
        (b"{", b"[", "is no entry of the log"),
    ],
)
def test_an_entry_that_says_something_else_is_refused(
    log: Log, bucket: MemoryBucket, old: bytes, new: bytes, message: str
) -> None:
    void(log, 2)
    path = slot_path(1)
    assert old in bucket.objects[path]
    bucket.objects[path] = sealed(bucket.objects[path].replace(old, new, 1))
    with pytest.raises(LogFormatError, match=message) as raised:
        Log(MemoryStore(bucket), patience=IMPATIENT).open()
    assert isinstance(raised.value, DamagedEntryError) == ("slot" in message), "a newer release is no damage"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[:99] + bytes([data[99] ^ 4]) + data[100:],
    "cut": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "another's": lambda data: b"{}",
}


class Flaky(Behind):
    """A store whose first reads of slot 1 are bad."""

    def __init__(self, bucket: MemoryBucket, *bad: Callable[[bytes], bytes]) -> None:
        super().__init__(MemoryStore(bucket, name="flaky"))
        self.bad = [*bad]

    @override
    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(path, offset, length)
        if path != slot_path(1) or length == 1 or not self.bad:
            return data
        return self.bad.pop(0)(data)


@pytest.fixture
def committed(log: Log, commit: CommitStep) -> None:
    commit(log, log.begin(), 10)


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("flipped", "don't match its checksum"),
        ("cut", "end with its checksum"),
        ("half", "end with its checksum"),
        ("empty", "it is empty"),
        ("longer", "end with its checksum"),
        ("another's", "end with its checksum"),
    ],
)
def test_one_that_stays_bad_is_named_with_its_root_and_the_command_that_repairs_it(
    log: Log, bucket: MemoryBucket, how: str, fault: str
) -> None:
    assert Log(Flaky(bucket, *[DAMAGES[how]] * 2), patience=IMPATIENT).open() == log.state
    says = rf"^memory://flaky/.*00000001\.json: slot 1 .*{fault}.*read 3 times.*repair memory://flaky"
    with pytest.raises(DamagedEntryError, match=says):
        Log(Flaky(bucket, *[DAMAGES[how]] * 3), patience=IMPATIENT).open()


@pytest.mark.usefixtures("committed")
def test_no_answer_to_a_further_reading_proves_nothing(log: Log, bucket: MemoryBucket) -> None:
    def silent(data: bytes) -> bytes:
        raise TransientStorageError("503")

    with pytest.raises(TransientStorageError):
        Log(Flaky(bucket, DAMAGES["cut"], silent), patience=IMPATIENT).open()
    patient = Patience(sleep=lambda _: None)
    assert Log(Flaky(bucket, DAMAGES["cut"], silent), patience=patient).open() == log.state


OBJECTS = Path(__file__).parents[2] / "data/log_format_2/root.json"
"""The objects of a root that the last release with that format wrote. Its indexes go back from slot 72 to 64 and 0."""


@pytest.fixture
def old_root() -> SmallRoot:
    old_root, objects = SmallRoot(), json.loads(OBJECTS.read_text())
    for path, text in objects["log"].items():
        old_root.change(path, text.encode())
    for path, text in objects["data"].items():
        old_root.change(path, base64.b64decode(text))
    return old_root


def test_it_opens_from_each_slot_as_if_every_entry_was_read(old_root: SmallRoot) -> None:
    log, truth = Log(old_root.store), LogState()
    later = {slot: old_root.store.read(slot_path(slot)) for slot in range(75)}
    for slot in later:
        old_root.change(slot_path(slot), None)
    for slot, data in later.items():
        old_root.change(slot_path(slot), data)
        truth = apply_entry(truth, slot, log.entry(slot))
        assert Log(old_root.store).open() == truth
    assert (truth.head, [record.slot for record in truth.line]) == (73, [73, 71, 70, 66])
    assert {record.slot for record in truth.commits.values() if record.quarantined} == {56}


def test_its_commits_are_whole_and_it_is_gone_on_from(old_root: SmallRoot) -> None:
    before = old_root.log.open()
    for record in before.live:
        assert not verify_commit(old_root.store, record, patience=DEFAULT_PATIENCE).bad
    old_root.begin(3)
    old_root.save(370)
    after = Log(old_root.store).open()
    assert after == old_root.log.state
    assert after.index == 75, "the begin has a whole index"
    assert {*before.commits} < {*after.commits}
