"""Opening the log: what it costs, and what is not taken for a log."""

from collections.abc import Callable

import pytest

from stepkeeper.errors import LogFormatError, LogGapError
from stepkeeper.log import Log, tail
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import DEFAULT_PATIENCE

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
    """A gap in the middle could be a lost entry; one at the start is what rules that delete old objects make."""
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
        with pytest.raises(LogGapError, match=rf"{missing:08d}\.json is gone, later slots are there"):
            tail.find_tail(MemoryStore(bucket), DEFAULT_PATIENCE)
        bucket.objects[slot_path(missing)] = taken


def test_a_slot_that_came_during_the_listing_is_no_gap(log: Log, bucket: MemoryBucket) -> None:
    void(log, 4)
    hidden = bucket.objects.pop(slot_path(2))

    def hook(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("after", "list"):
            bucket.objects[slot_path(2)] = hidden

    with pytest.raises(LogGapError, match=r"00000002\.json is gone, later slots are there"):
        Log(MemoryStore(bucket)).open()
    assert Log(MemoryStore(bucket, hook=hook)).open() == log.state


def sealed(entry: bytes) -> bytes:
    """The entry with the checksum that its bytes have."""
    content = entry.rpartition(b',"crc32c":')[0]
    return content + b',"crc32c":%d}' % crc32c(content)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"format":3', b'"format":4', "has format 4, this stepkeeper knows 3"),
        (b'"kind":"void"', b'"kind":"vote"', "is of the unknown kind 'vote'; known: begin, "),
        (b'"after"', b'"afterwards"', "unknown key 'afterwards'"),
        (b'"claim":0,"index"', b'"claim":1,"index"', "slot 1 says"),
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
    with pytest.raises(LogFormatError, match=message):
        Log(MemoryStore(bucket)).open()
