"""Test that a reader's pin keeps a commit's data, and that a reader who comes too late learns it."""

import logging
from collections.abc import Callable

import pytest

from stepkeeper.errors import PinFormatError, RestoreError, StorageError, TransientStorageError
from stepkeeper.log import Claim, CommitRecord, Log, LogState
from stepkeeper.retention.pins import (
    PIN_PREFIX,
    Pin,
    list_pins,
    pin_commit,
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


def test_names_that_are_no_pins_are_left_alone(bucket: MemoryBucket) -> None:
    for name in ("README.txt", "7-" + NONCE, "00000007-short", f"00000007-{NONCE}.bak"):
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
            f"says that it is pin 8-{NONCE}",
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
