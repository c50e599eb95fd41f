"""Test when the lease of a pin is over. A holder that renews in time, or returns at once, notices any loss of data."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from stepkeeper.errors import PinLostError
from stepkeeper.log import Log
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.retention.garbage import Garbage, gc, sweep
from stepkeeper.retention.leases import IsOver, lease_is_over, leases_by, report_pins
from stepkeeper.retention.pins import Pin, list_pin_names, pin_commit, put_pin, renew_pin
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import FaultHook, MemoryBucket, MemoryStore

HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("seen", "times_unix_s", "over"),
    [
        pytest.param(10, {10: 0.0}, False, id="nothing was put since"),
        pytest.param(10, {11: 0.0, 12: 0.0, 13: HOUR_S}, False, id="three entries, however far apart"),
        pytest.param(10, {11: 0.0, 12: 1.0, 14: HOUR_S}, False, id="the second and the last are close"),
        pytest.param(10, {11: 0.0, 12: 1.0, 14: HOUR_S + 1}, True, id="the second and the last span it"),
        pytest.param(10, {11: 0.0, 12: HOUR_S, 14: HOUR_S + 1}, False, id="the first was put late"),
        pytest.param(14, {11: 0.0, 12: 1.0, 14: HOUR_S + 1}, False, id="the holder has read them all"),
        pytest.param(10, {11: HOUR_S, 12: HOUR_S, 14: 0.0}, False, id="a store whose clock went back"),
        pytest.param(10, {11: 0.0, 14: HOUR_S + 1}, False, id="a store that lost the second"),
        pytest.param(None, {1: 0.0, 2: 1.0, 4: HOUR_S + 1}, False, id="a pin without a lease"),
    ],
)
def test_a_lease_runs_by_entries_and_by_the_stores_times_of_them(
    seen: int | None, times_unix_s: Mapping[int, float], over: bool
) -> None:
    assert lease_is_over(seen, max(times_unix_s), times_unix_s.get) is over


def after_a_pin(root: SmallRoot, bucket: MemoryBucket, *starts: int, minutes: float) -> Pin:
    """Return a pin that is never renewed. In each start after it, steps are saved, and earlier ones deleted."""
    now_s = [1e9]
    bucket.clock = lambda: now_s[0]
    pin = put(MemoryStore(bucket), 1, root.play("begin 1"))
    for n_steps in starts:
        root.play("begin")
        for _ in range(n_steps):
            now_s[0] += 60 * minutes
            root.play("7")
            root.play(f"-{root.log.state.line[1].slot}")
    return pin


def is_listed(store: MemoryStore, pin: Pin) -> bool:
    (report,) = report_pins(store, leases_by(StoreTimes(store), Log(store).open().tail))
    return report.name.path == pin.path and not report.is_over


@pytest.mark.parametrize("starts", [(2, 2, 2, 2), (1,) * 8, (8,)])
@pytest.mark.parametrize("looks", ["a collection", "a dry run", "a person", "a later start"])
def test_a_lease_goes_on_over_starts_and_ends_whoever_looks(
    root: SmallRoot, bucket: MemoryBucket, starts: tuple[int, ...], looks: str
) -> None:
    """No start is as long as a lease, and nothing was ever restored."""
    pin = after_a_pin(root, bucket, *starts, minutes=15)
    store = MemoryStore(bucket)
    if looks == "a later start":
        (folder,) = {path.rpartition("/")[0] for path in bucket.objects if path.startswith("1/")}
        is_over = leases_by(StoreTimes(store), root.log.state.tail)
        assert sweep(store, [Garbage(folder=folder, slot=1)], is_over=is_over) == ()
    elif looks == "a person":
        assert not is_listed(store, pin)
        return
    else:
        found = gc(Log(store), store, dry_run=looks == "a dry run")
        assert found.over == (pin.path,)
        if looks == "a dry run":
            return
    assert list_pin_names(store) == []
    assert not [path for path in bucket.objects if path.startswith("1/")]


@pytest.mark.parametrize(
    ("starts", "minutes", "has_times"),
    [((2, 2), 15, True), ((1,) * 8, 7, True), ((1,), 120, True), ((8,), 60, False)],
)
def test_a_lease_that_isnt_over_by_the_stores_clock_holds(
    root: SmallRoot, bucket: MemoryBucket, starts: tuple[int, ...], minutes: float, has_times: bool
) -> None:
    pin = after_a_pin(root, bucket, *starts, minutes=minutes)
    if not has_times:
        bucket.times_unix_s.clear()
    store = MemoryStore(bucket)
    assert is_listed(store, pin)
    assert gc(Log(store), store).over == ()
    assert is_listed(store, pin)


def before(slot: int) -> IsOver:
    """Let the leases be over of holders that had read less than `slot`."""
    return lambda seen: seen is not None and seen < slot


def put(store: MemoryStore, slot: int, seen: int | None) -> Pin:
    pin = Pin(slot=slot, nonce="a" * 32, holder="an evaluation", seen=seen)
    put_pin(store, pin)
    return pin


@dataclass(frozen=True)
class Passed:
    """A pinned commit that was deleted since."""

    pin: Pin
    readers: Log
    garbage: Garbage
    bucket: MemoryBucket

    def swept(self, slot: int, hook: FaultHook | None = None) -> bool:
        """Sweep, with leases over of holders that had read less than `slot`. Return True if the data is gone."""
        left = sweep(MemoryStore(self.bucket, hook=hook), [self.garbage], is_over=before(slot))
        has_data = any(path.startswith(self.garbage.folder) for path in self.bucket.objects)
        assert left == ((self.garbage,) if has_data else ())
        return not has_data

    def renew(self) -> Pin:
        return renew_pin(self.readers, MemoryStore(self.bucket), self.pin)


@pytest.fixture
def passed(root: SmallRoot, bucket: MemoryBucket) -> Passed:
    root.play("begin 10")
    readers = Log(root.store)
    pin, record = pin_commit(readers, root.store, lambda state: state.live[0], holder="an evaluation")
    assert pin is not None
    root.play("20 30 40 -1")
    return Passed(pin, readers, Garbage(folder=record.folder, slot=record.slot), bucket)


def test_who_never_renews_holds_its_data_for_a_lease_and_no_longer(passed: Passed) -> None:
    assert not passed.swept(0)
    assert sweep(MemoryStore(passed.bucket), [passed.garbage]) == (passed.garbage,)
    assert passed.swept(4)
    assert list_pin_names(MemoryStore(passed.bucket)) == []


def test_who_renews_while_its_pin_is_removed_keeps_its_data(passed: Passed) -> None:
    """The renewal finds the old name, so it is valid; the collection lists once more and keeps the data."""
    renewed: list[Pin] = []
    hook = at("before delete", lambda: renewed.append(passed.renew()), path=passed.pin.path, times=1)
    assert not passed.swept(4, hook)
    assert renewed


def test_who_renews_after_its_pin_was_removed_is_told(passed: Passed) -> None:
    told: list[bool] = []

    def renew() -> None:
        with pytest.raises(PinLostError):
            passed.renew()
        told.append(True)

    assert passed.swept(4, at("after delete", renew, path=passed.pin.path, times=1))
    assert told
