"""Reading an entry: again where its bytes are bad, and what is said of one that stays bad."""

from collections.abc import Callable

import pytest
from store_parts.behind import Behind
from typing_extensions import override

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


class Flaky(Behind):
    """A store whose first reads of slot 1 are bad; it can be opened once more."""

    def __init__(self, bucket: MemoryBucket, *bad: Callable[[bytes], bytes]) -> None:
        super().__init__(MemoryStore(bucket, name="flaky"))
        self.bad = [*bad]
        self.reads: list[int] = []
        """The connection that each read of the object was made over."""
        self.opened = self.closed = 0

    @override
    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.read_over(0, path, offset, length)

    def read_over(self, connection: int, path: str, offset: int, length: int | None) -> bytes:
        data = super().read(path, offset, length)
        if path != slot_path(1) or length == 1:
            return data
        self.reads.append(connection)
        return self.bad.pop(0)(data) if self.bad else data

    def reopen(self) -> "Connection":
        self.opened += 1
        return Connection(self, self.opened)

    @override
    def close(self) -> None:
        self.closed += 1


class Connection(Behind):
    """Another connection of a flaky store."""

    def __init__(self, flaky: Flaky, number: int) -> None:
        super().__init__(flaky)
        self.flaky, self.number = flaky, number

    @override
    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.flaky.read_over(self.number, path, offset, length)


@pytest.fixture(autouse=True)
def committed(log: Log, commit: CommitStep) -> None:
    commit(log, log.begin(), 10)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("n_bad", [1, 2])
def test_bytes_that_go_bad_on_the_way_are_read_again_over_fresh_connections(
    log: Log, bucket: MemoryBucket, how: str, n_bad: int
) -> None:
    flaky = Flaky(bucket, *[DAMAGES[how]] * n_bad)
    assert Log(flaky, patience=IMPATIENT).open() == log.state
    assert flaky.reads == list(range(n_bad + 1))
    assert flaky.opened == flaky.closed == n_bad


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("flipped", "another checksum"),
        ("cut", "end with its checksum"),
        ("half", "end with its checksum"),
        ("empty", "it is empty"),
    ],
)
def test_one_that_stays_bad_is_named_with_its_root_and_the_command_that_repairs_it(
    bucket: MemoryBucket, how: str, fault: str
) -> None:
    flaky = Flaky(bucket, *[DAMAGES[how]] * 3)
    says = (
        rf"^memory://flaky/.*00000001\.json: slot 1 .*{fault}.*read 3 times.*stepkeeper repair memory://flaky"
    )
    with pytest.raises(DamagedEntryError, match=says):
        Log(flaky, patience=IMPATIENT).open()
    assert flaky.reads == [0, 1, 2]
    assert flaky.opened == flaky.closed == 2


def test_a_store_that_has_one_connection_only_is_read_again_over_it(
    log: Log, bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, bad = MemoryStore(bucket), [b"", b"{}"]
    read = store.read
    monkeypatch.setattr(store, "read", lambda path: bad.pop() if bad and path == slot_path(1) else read(path))
    assert Log(store, patience=IMPATIENT).open() == log.state


def test_no_answer_to_a_further_reading_proves_nothing(log: Log, bucket: MemoryBucket) -> None:
    def silent(data: bytes) -> bytes:
        raise TransientStorageError("503")

    with pytest.raises(TransientStorageError):
        Log(Flaky(bucket, DAMAGES["cut"], silent), patience=IMPATIENT).open()
    patient = Patience(sleep=lambda _: None)
    assert Log(Flaky(bucket, DAMAGES["cut"], silent), patience=patient).open() == log.state


def test_what_a_newer_release_wrote_is_no_damage(bucket: MemoryBucket) -> None:
    flaky = Flaky(bucket, lambda data: b'{"format":99}')
    with pytest.raises(LogFormatError, match="has format 99") as raised:
        Log(flaky, patience=IMPATIENT).open()
    assert not isinstance(raised.value, DamagedEntryError)
    assert flaky.reads == [0]
