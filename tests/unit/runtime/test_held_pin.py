"""Test that a pin is renewed from a thread of its own while it is held, and removed once it is let go."""

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from stepkeeper.errors import StorageError, TransientStorageError
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.retention.held_pin import HeldPin, release_all_pins
from stepkeeper.retention.pins import list_pin_names, pin_commit, remove_pin
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.hooks import at

Hold = Callable[..., HeldPin]
IMPATIENT = Patience(total_s=0.0)
LIMIT_S = 60.0


@pytest.fixture
def root() -> SmallRoot:
    root = SmallRoot()
    root.play("begin 10")
    return root


@pytest.fixture
def bucket(root: SmallRoot) -> MemoryBucket:
    assert isinstance(root.store, MemoryStore)
    return root.store.bucket


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


def latest(state: LogState) -> CommitRecord:
    assert state.latest is not None
    return state.latest


def seen(bucket: MemoryBucket) -> list[int | None]:
    return [name.seen for name in list_pin_names(MemoryStore(bucket))]


class Renewals:
    """A store that tells when a pin was renewed; failing as often as wanted."""

    def __init__(self, bucket: MemoryBucket, failures: int = 0) -> None:
        self.done = threading.Event()
        self.store = MemoryStore(bucket, hook=self.hook)
        self.failures = failures

    def hook(self, moment: str, operation: str, path: str) -> None:
        if operation != "put_if_absent":
            return
        if moment == "before" and self.failures:
            self.failures -= 1
            raise TransientStorageError("no answer")
        if moment == "after":
            self.done.set()


@pytest.mark.parametrize("failures", [0, 3])
def test_a_pin_is_renewed_while_it_is_held(
    root: SmallRoot, bucket: MemoryBucket, hold: Hold, failures: int
) -> None:
    renewals = Renewals(bucket, failures)
    held = hold(renewals.store)
    slot = root.play("20")
    assert renewals.done.wait(LIMIT_S)
    assert held.is_held()
    assert seen(bucket)[-1] == slot
    held.release()
    assert seen(bucket) == []
    assert not held.is_held()


def test_who_has_lost_its_pin_knows(
    root: SmallRoot, bucket: MemoryBucket, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    renewals = Renewals(bucket)
    held = hold(renewals.store)
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
    assert f"`stepkeeper gc memory:// --pins --remove {held._pin.name.text}` takes it" in caplog.text
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
