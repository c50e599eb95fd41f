"""Test when the lease of a pin is over, and that who renews in time, or comes back at once, loses no data unseen."""

from collections.abc import Mapping

import pytest

from stepkeeper.checkpoint.manifest import checkpoint_folder
from stepkeeper.errors import PinLostError
from stepkeeper.log import Claim, CommitRecord, Log, LogState, ManifestRef
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.log.tail import slot_path
from stepkeeper.retention import leases
from stepkeeper.retention.garbage import Garbage, gc, sweep
from stepkeeper.retention.leases import IsOver, drop_over, lease_is_over, leases_by, report_pins
from stepkeeper.retention.pinning import pin_commit, renew_pin
from stepkeeper.retention.pins import PIN_PREFIX, Pin, list_pin_names, pin_path, put_pin
from stepkeeper.storage.memory import MemoryBucket, MemoryStore

HOUR_S = 3600.0


def save(log: Log, claim: Claim, step: int) -> CommitRecord:
    folder = checkpoint_folder(step, claim.slot, f"{step:032x}")
    store = log._store
    for name in ("__0_0.distcp", "manifest.0.json"):
        store.write(f"{folder}/{name}", [b"x"])
    manifest = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)
    return log.commit(claim, step=step, folder=folder, size_bytes=2, manifest=manifest)


@pytest.mark.parametrize(
    ("seen", "times_unix_s", "over"),
    [
        pytest.param(10, {10: 0.0}, False, id="nothing was put since"),
        pytest.param(
            10, {11: 0.0, 12: 0.0, 13: HOUR_S}, False, id="three entries are not enough, however far apart"
        ),
        pytest.param(
            10, {11: 0.0, 12: 1.0, 14: HOUR_S}, False, id="the second and the last within the lease"
        ),
        pytest.param(
            10, {11: 0.0, 12: 1.0, 14: HOUR_S + 1}, True, id="the second and the last span the lease"
        ),
        pytest.param(
            10,
            {11: 0.0, 12: HOUR_S, 14: HOUR_S + 1},
            False,
            id="the first was written long before it was put",
        ),
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


def after_a_pin(bucket: MemoryBucket, *starts: int, minutes: float) -> tuple[Log, Pin]:
    """Return a log and a pin from its beginning that nobody renews; in each start so many steps are saved after it."""
    now_s = [1e9]
    bucket.clock = lambda: now_s[0]
    store = MemoryStore(bucket)
    log = Log(store)
    claim = log.begin()
    save(log, claim, 1)
    pin = put(store, 1, log.state.tail)
    step = 1
    for n_steps in starts:
        claim = log.begin()
        for _ in range(n_steps):
            now_s[0] += 60 * minutes
            step += 1
            save(log, claim, step)
            log.delete(claim, lambda state: [state.line[1].slot])
    return log, pin


def is_listed(store: MemoryStore, pin: Pin) -> bool:
    (report,) = report_pins(store, leases_by(StoreTimes(store), Log(store).open().tail))
    return report.name.path == pin.path and not report.is_over


@pytest.mark.parametrize("starts", [(2, 2, 2, 2), (1,) * 8, (8,)])
@pytest.mark.parametrize("looks", ["a collection", "a dry run", "a person", "a later start"])
def test_a_lease_goes_on_over_starts_and_ends_whoever_looks(
    bucket: MemoryBucket, starts: tuple[int, ...], looks: str
) -> None:
    """No start is as long as a lease, and nothing was ever restored."""
    log, pin = after_a_pin(bucket, *starts, minutes=15)
    store = MemoryStore(bucket)
    if looks == "a later start":
        garbage = Garbage(folder=f"1/0-{1:032x}", slot=1)
        assert sweep(store, [garbage], is_over=leases_by(StoreTimes(store), log.state.tail)) == ()
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


@pytest.mark.parametrize(("starts", "minutes"), [((2, 2), 15), ((1,) * 8, 7), ((1,), 120)])
def test_a_lease_that_isnt_over_by_the_stores_clock_holds(
    bucket: MemoryBucket, starts: tuple[int, ...], minutes: float
) -> None:
    _, pin = after_a_pin(bucket, *starts, minutes=minutes)
    store = MemoryStore(bucket)
    assert is_listed(store, pin)
    assert gc(Log(store), store).over == ()
    assert is_listed(store, pin)


def test_where_the_store_tells_no_times_no_lease_ends(bucket: MemoryBucket) -> None:
    _, pin = after_a_pin(bucket, 8, minutes=60)
    bucket.times_unix_s.clear()
    assert is_listed(MemoryStore(bucket), pin)


def test_a_damaged_entry_after_it_changes_no_lease(bucket: MemoryBucket) -> None:
    log, pin = after_a_pin(bucket, 8, minutes=15)
    bucket.objects[slot_path(pin.slot + 2)] = b""
    assert gc(Log(MemoryStore(bucket)), MemoryStore(bucket)).over == (pin.path,)
    assert log.state.tail > pin.slot + 2


def test_a_lease_costs_two_requests_however_long_the_log_is(bucket: MemoryBucket) -> None:
    log, pin = after_a_pin(bucket, 200, minutes=1)
    asked: list[str] = []
    store = MemoryStore(bucket, hook=lambda moment, operation, path: asked.append(f"{moment} {path}"))
    is_over = leases_by(StoreTimes(store), log.state.tail)
    assert is_over(pin.seen)
    assert is_over(pin.seen)
    assert sum(each.startswith("before") for each in asked) == 2


def before(slot: int) -> IsOver:
    """Let the leases be over of holders that had read less than `slot`."""
    return lambda seen: seen is not None and seen < slot


def put(store: MemoryStore, slot: int, seen: int | None, nonce: str = "a") -> Pin:
    pin = Pin(slot=slot, nonce=nonce * 32, holder="an evaluation", seen=seen)
    put_pin(store, pin)
    return pin


def test_pins_that_are_over_go_with_all_their_names_and_the_others_hold(bucket: MemoryBucket) -> None:
    store = MemoryStore(bucket)
    stale = [put(store, 3, 4), put(store, 3, 5)]
    put(store, 6, 3, nonce="b")
    alive = put(store, 6, 9, nonce="b")
    fork = put(store, 2, None, nonce="c")
    beside = put(store, 3, 9, nonce="d")
    seen = drop_over(store, before(6), dry_run=True)
    assert seen.slots == {2, 3, 6}
    assert seen.over == tuple(pin.path for pin in stale)
    assert len(list_pin_names(store)) == 6
    assert drop_over(store, before(6)) == seen
    assert {pin.path for pin in (alive, fork, beside)} < set(bucket.objects)
    assert not {pin.path for pin in stale} & set(bucket.objects)
    assert drop_over(store, before(6)).over == ()


def latest(state: LogState) -> CommitRecord:
    assert state.latest is not None
    return state.latest


def pinned_and_passed(log: Log, bucket: MemoryBucket) -> tuple[Pin, Log, CommitRecord, Garbage]:
    """Return the pin of a commit that was deleted since, its holder's log, that commit, and it as garbage."""
    claim = log.begin()
    record = save(log, claim, 10)
    store = MemoryStore(bucket)
    readers = Log(store)
    pin, _ = pin_commit(readers, store, latest, holder="an evaluation")
    assert pin is not None
    for step in (20, 30, 40):
        save(log, claim, step)
    log.delete(claim, lambda state: [record.slot])
    return pin, readers, record, Garbage(folder=record.folder, slot=record.slot)


def has_data(bucket: MemoryBucket, record: CommitRecord) -> bool:
    return any(path.startswith(record.folder) for path in bucket.objects)


def test_who_never_renews_holds_its_data_for_a_lease_and_no_longer(log: Log, bucket: MemoryBucket) -> None:
    _, _, record, garbage = pinned_and_passed(log, bucket)
    store = MemoryStore(bucket)
    assert sweep(store, [garbage], is_over=before(0)) == (garbage,)
    assert sweep(store, [garbage]) == (garbage,)
    assert has_data(bucket, record)
    assert sweep(store, [garbage], is_over=before(4)) == ()
    assert not has_data(bucket, record)
    assert list_pin_names(store) == []


def test_who_is_slow_and_renews_keeps_its_data(log: Log, bucket: MemoryBucket) -> None:
    pin, readers, record, garbage = pinned_and_passed(log, bucket)
    store = MemoryStore(bucket)
    pin = renew_pin(readers, store, pin)
    assert sweep(store, [garbage], is_over=before(4)) == (garbage,)
    assert sweep(store, [garbage], is_over=before(4)) == (garbage,)
    assert has_data(bucket, record)


def test_who_renews_while_its_pin_is_removed_keeps_its_data(log: Log, bucket: MemoryBucket) -> None:
    """The renewal finds the old name, so it is good; the collection lists once more and spares the data."""
    pin, readers, record, garbage = pinned_and_passed(log, bucket)
    renewals = [lambda: renew_pin(readers, MemoryStore(bucket), pin)]

    def hook(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("before", "delete") and path == pin.path and renewals:
            renewals.pop()()

    store = MemoryStore(bucket, hook=hook)
    assert sweep(store, [garbage], is_over=before(4)) == (garbage,)
    assert not renewals
    assert has_data(bucket, record)


def test_who_renews_after_its_pin_was_removed_is_told(log: Log, bucket: MemoryBucket) -> None:
    pin, readers, record, garbage = pinned_and_passed(log, bucket)
    lost: list[PinLostError] = []

    def hook(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("after", "delete") and path == pin.path and not lost:
            with pytest.raises(PinLostError) as raised:
                renew_pin(readers, MemoryStore(bucket), pin)
            lost.append(raised.value)

    assert sweep(MemoryStore(bucket, hook=hook), [garbage], is_over=before(4)) == ()
    assert lost
    assert not has_data(bucket, record)


def test_a_collection_removes_what_is_over_and_says_so(
    log: Log, bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin, _, record, _ = pinned_and_passed(log, bucket)
    log.begin()
    store = MemoryStore(bucket)
    for slot in range(log.state.tail + 1):
        bucket.times_unix_s[slot_path(slot)] = slot * HOUR_S / 4
    assert gc(Log(store), store).over == ()
    assert has_data(bucket, record)
    bucket.times_unix_s[slot_path(log.state.tail)] = 1.75 * HOUR_S
    would = gc(Log(store), store, dry_run=True)
    assert (would.over, [each.folder for each in would.collected]) == ((pin.path,), [record.folder])
    assert has_data(bucket, record)
    assert gc(Log(store), store) == would
    assert not has_data(bucket, record)
    assert not [path for path in bucket.objects if path.startswith(PIN_PREFIX)]


def test_people_are_told_of_every_pin(bucket: MemoryBucket) -> None:
    store = MemoryStore(bucket)
    put(store, 3, 4)
    current = put(store, 6, 9, nonce="b")
    bucket.objects[pin_path(7, "e" * 32)] = b"{}"
    bucket.times_unix_s[current.path] = 12.5
    reports = report_pins(store, before(6))
    assert [(each.name.slot, each.pin and each.pin.holder, each.is_over) for each in reports] == [
        (3, "an evaluation", True),
        (6, "an evaluation", False),
        (7, None, False),
    ]
    assert reports[1].name.time_unix_s == 12.5


def test_a_holder_renews_often_enough_to_fail_a_few_times() -> None:
    assert leases.RENEW_EVERY_S * 5 < leases.LEASE_S
