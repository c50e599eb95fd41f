"""Test a reader's pin: what it holds, its renewal by a thread, and the error for a pin that is too late."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from stepkeeper.errors import RestoreError, StorageError, TransientStorageError
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.retention.held_pin import HeldPin, release_all_pins
from stepkeeper.retention.pins import (
    Pin,
    PinName,
    list_pin_names,
    list_pins,
    pin_commit,
    pinned_slots,
    put_pin,
    remove_pin,
)
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import FaultHook, MemoryBucket, MemoryStore

IMPATIENT = Patience(total_s=0.0)
NONCE = "0123456789abcdef" * 2
NO_ANSWER = TransientStorageError("no answer")


@pytest.fixture
def root() -> SmallRoot:
    return SmallRoot(words="begin 10 20")


def latest(state: LogState) -> CommitRecord:
    if state.latest is None:
        raise RestoreError("nothing there")
    return state.latest


def pinned(bucket: MemoryBucket, hook: FaultHook | None = None) -> Pin | None:
    """Pin the latest commit of step 20 through a store with that hook."""
    store = MemoryStore(bucket, hook=hook)
    log = Log(store, patience=IMPATIENT)
    pin, record = pin_commit(log, store, latest, holder="ml/eval", reason="evaluates", patience=IMPATIENT)
    assert record.step == 20
    return pin


@pytest.mark.parametrize(
    ("pin", "name", "says"),
    [
        (
            Pin(slot=7, nonce=NONCE, holder="ml/eval", reason="a study"),
            f"00000007-{NONCE}",
            f'{{"format":1,"holder":"ml/eval","nonce":"{NONCE}","reason":"a study","slot":7}}',
        ),
        (
            Pin(slot=7, nonce=NONCE, holder="follow by 5", host="eval-0", seen=12),
            f"00000007-{NONCE}-00000012",
            f'{{"format":1,"holder":"follow by 5","host":"eval-0","nonce":"{NONCE}","reason":"","seen":12,"slot":7}}',
        ),
    ],
    ids=["without a lease", "with a lease it is named after what its holder has read"],
)
def test_a_pin_is_a_small_object_named_after_what_it_holds(pin: Pin, name: str, says: str) -> None:
    store = MemoryStore()
    put_pin(store, pin)
    put_pin(store, pin)
    assert store.bucket.objects == {f".stepkeeper/pins/{name}": says.encode()}
    assert list_pins(store) == [pin]
    assert pinned_slots(store) == {7}
    (found,) = list_pin_names(store)
    assert found == PinName(slot=7, nonce=NONCE, seen=pin.seen)
    assert found.text == f"00000007-{NONCE}"
    assert found.time_unix_s is not None
    for _ in range(2):
        remove_pin(store, pin)
        assert store.bucket.objects == {}


def test_a_commit_that_is_deleted_before_the_pin_is_there_is_not_held(
    root: SmallRoot, bucket: MemoryBucket
) -> None:
    store = MemoryStore(
        bucket, hook=at("before put_if_absent", lambda: root.play("-1"), path="pins", times=1)
    )
    log = Log(store)
    log.open()
    pin, record = pin_commit(log, store, lambda state: state.live[0], holder="ml/eval")
    assert record.step == 20
    assert list_pins(store) == [pin]


def test_who_may_not_write_reads_without_a_pin_and_is_warned(
    bucket: MemoryBucket, caplog: pytest.LogCaptureFixture
) -> None:
    refused = StorageError("not allowed: no storage.objects.create")
    with caplog.at_level(logging.WARNING):
        assert pinned(bucket, at("before put_if_absent", refused)) is None
    assert "commit 2 of memory:// is read without a pin" in caplog.text
    assert "no storage.objects.create" in caplog.text


def test_no_answer_is_no_permission_to_read_unpinned(bucket: MemoryBucket) -> None:
    with pytest.raises(TransientStorageError):
        pinned(bucket, at("before put_if_absent", NO_ANSWER))


def test_a_pin_is_not_left_where_the_log_says_nothing_after_it(bucket: MemoryBucket) -> None:
    was_put = False

    def hook(moment: str, operation: str, path: str) -> None:
        nonlocal was_put
        if was_put and operation != "delete":
            raise NO_ANSWER
        was_put = was_put or (moment == "after" and "/pins/" in path)

    with pytest.raises(TransientStorageError):
        pinned(bucket, hook)
    assert was_put
    assert list_pins(MemoryStore(bucket)) == []


Hold = Callable[..., HeldPin]
LIMIT_S = 60.0


@pytest.fixture
def hold(bucket: MemoryBucket) -> Iterator[Hold]:
    """Pin the latest commit, and renew the pin as often as can be."""
    held: list[HeldPin] = []

    def make(store: MemoryStore | None = None) -> HeldPin:
        quiet = MemoryStore(bucket)
        pin, _ = pin_commit(Log(quiet), quiet, latest, holder="an evaluation")
        assert pin is not None
        made = HeldPin(store or quiet, pin, read_s=time.monotonic(), renew_every_s=0.001, patience=IMPATIENT)
        held.append(made)
        return made

    yield make
    for each in held:
        each.release(LIMIT_S)


def seen(bucket: MemoryBucket) -> list[int | None]:
    return [name.seen for name in list_pin_names(MemoryStore(bucket))]


@pytest.mark.parametrize("failures", [0, 3])
def test_a_pin_is_renewed_while_it_is_held(
    root: SmallRoot, bucket: MemoryBucket, hold: Hold, failures: int
) -> None:
    held = hold(MemoryStore(bucket, hook=at("before put_if_absent", NO_ANSWER, times=failures)))
    for step in ("30", "40", "50"):
        slot = root.play(step)
        while seen(bucket)[-1] != slot:
            os.sched_yield()
    while len(seen(bucket)) > 2:  # the name before the newest stays
        os.sched_yield()
    assert held.is_held()
    held.release()
    assert seen(bucket) == []
    assert not held.is_held()


def test_who_has_lost_its_pin_knows(
    root: SmallRoot, bucket: MemoryBucket, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    held = hold()
    remove_pin(MemoryStore(bucket), held._pin)
    assert not held.is_held()
    root.play("20")
    held._thread.join(LIMIT_S)
    assert not held._thread.is_alive()
    assert not held.is_held()
    assert "is gone: it wasn't renewed for too long" in caplog.text
    assert seen(bucket) == []


def test_a_pin_that_can_not_be_removed_is_named_with_the_command_that_does(
    bucket: MemoryBucket, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    refused = StorageError("not allowed: no storage.objects.delete")
    held = hold(MemoryStore(bucket, hook=at("before delete", refused)))
    with caplog.at_level(logging.WARNING):
        held.release(LIMIT_S)
    assert f"`stepkeeper gc memory:// --pins --remove {held._pin.name.text}` removes it" in caplog.text
    assert "no storage.objects.delete" in caplog.text


def test_a_store_that_hangs_is_not_waited_for_longer_than_that(
    bucket: MemoryBucket, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    answered = threading.Event()
    held = hold(MemoryStore(bucket, hook=at("before delete", lambda: answered.wait(LIMIT_S))))
    held.release(0.0)
    assert "gave no answer for 0 s" in caplog.text
    answered.set()
    held.release(LIMIT_S)
    assert seen(bucket) == []


def test_pins_go_when_the_interpreter_ends(bucket: MemoryBucket, hold: Hold) -> None:
    for _ in range(3):
        hold()
    assert len(seen(bucket)) == 3
    release_all_pins()
    assert seen(bucket) == []
