"""Reading an entry: again where its bytes are bad, and what is said of one that stays bad."""

from collections.abc import Callable

import pytest

from stepkeeper.errors import DamagedEntryError, LogFormatError, TransientStorageError
from stepkeeper.log import Log
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import Patience

CommitStep = Callable[..., int]
IMPATIENT = Patience(total_s=0, sleep=lambda _: None)
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[:99] + bytes([data[99] ^ 4]) + data[100:],
    "cut": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "another's": lambda data: b"{}",
}


class Flaky:
    """A store whose first reads of one object are bad; it can be opened anew."""

    def __init__(self, bucket: MemoryBucket, path: str, bad: list[Callable[[bytes], bytes]]) -> None:
        self.inner = MemoryStore(bucket, name="flaky")
        self.path, self.bad = path, bad
        self.reads: list[int] = []
        """The connection that each read of the object was made over."""

        self.opened = self.closed = 0
        self.uri = self.inner.uri
        self.put_if_absent, self.write = self.inner.put_if_absent, self.inner.write
        self.list, self.list_page, self.delete = self.inner.list, self.inner.list_page, self.inner.delete

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.read_over(0, path, offset, length)

    def read_over(self, connection: int, path: str, offset: int, length: int | None) -> bytes:
        data = self.inner.read(path, offset, length)
        if path != self.path or length == 1:
            return data
        self.reads.append(connection)
        return self.bad.pop(0)(data) if self.bad else data

    def reopen(self) -> "Connection":
        self.opened += 1
        return Connection(self, self.opened)

    def close(self) -> None:
        self.closed += 1


class Connection:
    """Another connection of a flaky store."""

    def __init__(self, store: Flaky, number: int) -> None:
        self.store, self.number = store, number
        self.uri, self.close = store.uri, store.close
        self.put_if_absent, self.write = store.put_if_absent, store.write
        self.list, self.delete = store.list, store.delete

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.store.read_over(self.number, path, offset, length)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("n_bad", [1, 2])
def test_bytes_that_go_bad_on_the_way_are_read_again_over_fresh_connections(
    log: Log, bucket: MemoryBucket, commit: CommitStep, how: str, n_bad: int
) -> None:
    commit(log, log.begin(), 10)
    flaky = Flaky(bucket, slot_path(1), [DAMAGES[how]] * n_bad)
    assert Log(flaky, patience=IMPATIENT).open() == log.state
    assert flaky.reads == list(range(n_bad + 1))
    assert flaky.opened == flaky.closed == n_bad


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("flipped", "its bytes have another checksum than it says"),
        ("cut", "it doesn't end with its checksum"),
        ("half", "it doesn't end with its checksum"),
        ("empty", "it is empty"),
    ],
)
def test_one_that_stays_bad_is_named_with_its_root_and_what_mends_it(
    log: Log, bucket: MemoryBucket, commit: CommitStep, how: str, fault: str
) -> None:
    commit(log, log.begin(), 10)
    flaky = Flaky(bucket, slot_path(1), [DAMAGES[how]] * 3)
    with pytest.raises(DamagedEntryError) as raised:
        Log(flaky, patience=IMPATIENT).open()
    assert flaky.reads == [0, 1, 2]
    assert flaky.opened == flaky.closed == 2
    assert str(raised.value).startswith("memory://flaky/.stepkeeper/log/00000001.json: slot 1 of the log of ")
    assert f"is not what was written: {fault}" in str(raised.value)
    assert "(read 3 times)" in str(raised.value)
    assert "stepkeeper repair memory://flaky" in str(raised.value)


def test_a_store_that_cannot_be_opened_anew_is_read_again_as_it_is(
    log: Log, bucket: MemoryBucket, commit: CommitStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(log, log.begin(), 10)
    store, bad = MemoryStore(bucket), [b"", b"{}"]
    read = store.read
    monkeypatch.setattr(store, "read", lambda path: bad.pop() if bad and path == slot_path(1) else read(path))
    assert Log(store, patience=IMPATIENT).open() == log.state


def test_no_answer_to_a_further_reading_proves_nothing(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    commit(log, log.begin(), 10)

    def silent(data: bytes) -> bytes:
        raise TransientStorageError("503")

    flaky = Flaky(bucket, slot_path(1), [DAMAGES["cut"], silent])
    with pytest.raises(TransientStorageError):
        Log(flaky, patience=IMPATIENT).open()
    flaky = Flaky(bucket, slot_path(1), [DAMAGES["cut"], silent])
    assert Log(flaky, patience=Patience(sleep=lambda _: None)).open() == log.state


def test_what_a_newer_release_wrote_is_no_damage(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    commit(log, log.begin(), 10)
    flaky = Flaky(bucket, slot_path(1), [lambda data: b'{"format":99}'])
    with pytest.raises(LogFormatError, match="has format 99") as raised:
        Log(flaky, patience=IMPATIENT).open()
    assert not isinstance(raised.value, DamagedEntryError)
    assert flaky.reads == [0]
