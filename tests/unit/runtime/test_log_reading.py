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


@pytest.fixture(autouse=True)
def committed(log: Log, commit: CommitStep) -> None:
    commit(log, log.begin(), 10)


@pytest.mark.parametrize("how", DAMAGES)
def test_bytes_that_go_bad_on_the_way_are_read_again(log: Log, bucket: MemoryBucket, how: str) -> None:
    assert Log(Flaky(bucket, *[DAMAGES[how]] * 2), patience=IMPATIENT).open() == log.state


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
    assert not flaky.bad


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
