"""Test that a reader's pin keeps a commit's data, and that a reader who comes too late learns it."""

import logging
from collections.abc import Callable

import pytest

from stepkeeper.errors import PinFormatError, PinLostError, RestoreError, StorageError, TransientStorageError
from stepkeeper.log import Claim, CommitRecord, Log, LogState, ManifestRef
from stepkeeper.retention.pinning import pin_commit, renew_pin
from stepkeeper.retention.pins import (
    PIN_PREFIX,
    Pin,
    PinName,
    is_pinned,
    list_pin_names,
    list_pins,
    pin_path,
    pinned_slots,
    put_pin,
    remove_pin,
)
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import Patience

CommitStep = Callable[..., int]
IMPATIENT = Patience(total_s=0.0)
NONCE = "0123456789abcdef" * 2


@pytest.fixture
def writer(log: Log, commit: CommitStep) -> Log:
    claim = log.begin()
    for step in (10, 20):
        commit(log, claim, step)
    return log


def latest(state: LogState) -> CommitRecord:
    if state.latest is None:
        raise RestoreError("nothing there")
    return state.latest


def oldest(state: LogState) -> CommitRecord:
    return state.live[0]


def delete_oldest(log: Log) -> None:
    claim = Claim(slot=0, nonce=log.entry(0).nonce)
    log.delete(claim, lambda state: [state.live[0].slot])


def test_a_pin_is_a_small_object_named_after_what_it_holds(bucket: MemoryBucket) -> None:
    store = MemoryStore(bucket)
    pin = Pin(slot=7, nonce=NONCE, holder="ml/eval", root="gs://b/fork", reason="a fork")
    put_pin(store, pin)
    put_pin(store, pin)
    assert bucket.objects == {
        f".stepkeeper/pins/00000007-{NONCE}": b'{"format":1,"holder":"ml/eval","nonce":"'
        + NONCE.encode()
        + b'","reason":"a fork","root":"gs://b/fork","slot":7}'
    }
    assert list_pins(store) == [pin]
    assert pinned_slots(store) == {7}
    remove_pin(store, pin)
    remove_pin(store, pin)
    assert list_pins(store) == []


def test_a_pin_with_a_lease_is_named_after_the_last_slot_that_its_holder_has_read(
    bucket: MemoryBucket,
) -> None:
    store = MemoryStore(bucket)
    pin = Pin(slot=7, nonce=NONCE, holder="follow by process 5", host="eval-0", seen=12)
    put_pin(store, pin)
    assert bucket.objects == {
        f".stepkeeper/pins/00000007-{NONCE}-00000012": b'{"format":1,"holder":"follow by process 5","host":"eval-0",'
        b'"nonce":"' + NONCE.encode() + b'","reason":"","seen":12,"slot":7}'
    }
    (name,) = list_pin_names(store)
    assert name == PinName(slot=7, nonce=NONCE, seen=12)
    assert name.time_unix_s is not None
    assert name.text == f"00000007-{NONCE}"


def test_names_that_are_no_pins_are_left_alone(bucket: MemoryBucket) -> None:
    for name in (
        "README.txt",
        "7-" + NONCE,
        "00000007-short",
        f"00000007-{NONCE}.bak",
        f"00000007-{NONCE}-12",
    ):
        bucket.objects[f".stepkeeper/pins/{name}"] = b""
    assert pinned_slots(MemoryStore(bucket)) == set()
    assert list_pins(MemoryStore(bucket)) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no pin: "),
        (b"[]", "is no pin of format 1"),
        (b'{"format":2}', "is no pin of format 1"),
        (b'{"format":1,"slot":7}', "is no pin: "),
        (
            b'{"format":1,"slot":8,"nonce":"' + NONCE.encode() + b'","holder":"x"}',
            f"says that it is pin 00000008-{NONCE}",
        ),
        (
            b'{"format":1,"slot":7,"nonce":"' + NONCE.encode() + b'","holder":"x","seen":3}',
            f"says that it is pin 00000007-{NONCE}-00000003",
        ),
    ],
)
def test_a_pin_that_says_something_else_is_refused_by_name(
    bucket: MemoryBucket, data: bytes, message: str
) -> None:
    bucket.objects[pin_path(7, NONCE)] = data
    with pytest.raises(PinFormatError, match=message):
        list_pins(MemoryStore(bucket))


def test_holding_pins_what_is_chosen(bucket: MemoryBucket, writer: Log) -> None:
    store = MemoryStore(bucket)
    pin, record = pin_commit(Log(store), store, latest, holder="ml/eval", reason="evaluates")
    assert record.step == 20
    assert pin is not None
    assert (pin.slot, pin.holder, pin.reason) == (record.slot, "ml/eval", "evaluates")
    assert list_pins(store) == [pin]


def test_a_forks_pin_has_the_name_it_is_given(bucket: MemoryBucket, writer: Log) -> None:
    store = MemoryStore(bucket)
    for _ in range(2):
        pin, _ = pin_commit(Log(store), store, latest, holder="ml/fork", nonce=NONCE, root="gs://b/fork")
        assert pin is not None
    assert [(pin.nonce, pin.root) for pin in list_pins(store)] == [(NONCE, "gs://b/fork")]


def test_a_commit_that_is_deleted_before_the_pin_is_there_is_not_held(
    bucket: MemoryBucket, writer: Log
) -> None:
    deletions = [lambda: delete_oldest(writer)]

    def hook(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("before", "put_if_absent") and deletions:
            deletions.pop()()

    store = MemoryStore(bucket, hook=hook)
    log = Log(store)
    log.open()
    pin, record = pin_commit(log, store, oldest, holder="ml/eval")
    assert record.step == 20
    assert list_pins(store) == [pin]


def test_who_may_not_write_reads_without_a_pin_and_is_told(
    bucket: MemoryBucket, writer: Log, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(moment: str, operation: str, path: str) -> None:
        if operation == "put_if_absent":
            raise StorageError("not allowed: no storage.objects.create")

    store = MemoryStore(bucket, hook=hook)
    with caplog.at_level(logging.WARNING):
        pin, record = pin_commit(Log(store), store, latest, holder="ml/eval")
    assert (pin, record.step) == (None, 20)
    assert "commit 2 of memory:// is read without a pin" in caplog.text
    assert "no storage.objects.create" in caplog.text


def test_no_answer_is_no_permission_to_read_unpinned(bucket: MemoryBucket, writer: Log) -> None:
    def hook(moment: str, operation: str, path: str) -> None:
        if operation == "put_if_absent":
            raise TransientStorageError("no answer")

    store = MemoryStore(bucket, hook=hook)
    with pytest.raises(TransientStorageError):
        pin_commit(Log(store), store, latest, holder="ml/eval", patience=IMPATIENT)


def test_a_pin_is_not_left_where_the_log_says_nothing_after_it(bucket: MemoryBucket, writer: Log) -> None:
    pinned = False

    def hook(moment: str, operation: str, path: str) -> None:
        nonlocal pinned
        if pinned and operation != "delete":
            raise TransientStorageError("no answer")
        pinned = pinned or (moment == "after" and path.startswith(PIN_PREFIX))

    store = MemoryStore(bucket, hook=hook)
    with pytest.raises(TransientStorageError):
        pin_commit(Log(store, patience=IMPATIENT), store, latest, holder="ml/eval", patience=IMPATIENT)
    assert pinned
    assert list_pins(MemoryStore(bucket)) == []


def test_where_there_is_nothing_to_choose_nothing_is_pinned(bucket: MemoryBucket) -> None:
    store = MemoryStore(bucket)
    with pytest.raises(RestoreError, match="nothing there"):
        pin_commit(Log(store), store, latest, holder="ml/eval")
    assert bucket.objects == {}


def pin_of(log: Log, store: MemoryStore) -> Pin:
    pin, _ = pin_commit(log, store, latest, holder="ml/eval")
    assert pin is not None
    return pin


def test_a_renewal_is_another_name_and_the_one_before_it_stays(bucket: MemoryBucket, writer: Log) -> None:
    store = MemoryStore(bucket)
    log = Log(store)
    pin = first = pin_of(log, store)
    assert first.seen == writer.state.tail
    seen: list[int | None] = [first.seen]
    for step in (30, 40, 50):
        _commit_step(writer, step)
        pin = renew_pin(log, store, pin)
        assert (pin.slot, pin.nonce, pin.seen) == (first.slot, first.nonce, writer.state.tail)
        seen.append(pin.seen)
        assert [name.seen for name in list_pin_names(store)] == seen[-2:]
        assert list_pins(store) == [pin]
    remove_pin(store, first)
    assert list_pin_names(store) == []


def test_where_the_log_stands_still_nothing_is_put(bucket: MemoryBucket, writer: Log) -> None:
    store = MemoryStore(bucket)
    log = Log(store)
    pin = pin_of(log, store)
    before = dict(bucket.objects)
    assert renew_pin(log, store, pin) == pin
    assert renew_pin(Log(store), store, pin) == pin
    assert bucket.objects == before


def test_a_holder_whose_pin_was_removed_is_told_and_leaves_nothing(bucket: MemoryBucket, writer: Log) -> None:
    store = MemoryStore(bucket)
    log = Log(store)
    pin = pin_of(log, store)
    assert is_pinned(store, pin)
    remove_pin(store, pin)
    assert not is_pinned(store, pin)
    _commit_step(writer, 30)
    with pytest.raises(PinLostError, match=f"{pin_path(pin.slot, pin.nonce, pin.seen)} is gone"):
        renew_pin(log, store, pin)
    assert list_pin_names(store) == []


def test_a_renewal_that_got_no_answer_is_made_again(bucket: MemoryBucket, writer: Log) -> None:
    answers = ["lost"]

    def hook(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("after", "put_if_absent") and answers:
            raise TransientStorageError(answers.pop())

    store = MemoryStore(bucket)
    log = Log(store)
    pin = pin_of(log, store)
    _commit_step(writer, 30)
    with pytest.raises(TransientStorageError):
        renew_pin(log, MemoryStore(bucket, hook=hook), pin, patience=IMPATIENT)
    assert renew_pin(log, store, pin).seen == writer.state.tail


def test_a_fork_has_no_lease(bucket: MemoryBucket, writer: Log) -> None:
    store = MemoryStore(bucket)
    pin, _ = pin_commit(Log(store), store, latest, holder="ml/fork", nonce=NONCE, root="gs://b/fork")
    assert pin is not None
    assert pin.seen is None


def _commit_step(log: Log, step: int) -> None:
    claim = Claim(slot=0, nonce=log.entry(0).nonce)
    manifest = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)
    log.commit(claim, step=step, folder=f"{step}/0-{step:032x}", size_bytes=10, manifest=manifest)
