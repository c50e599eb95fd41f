"""Find the pins whose holders are gone: a lease runs by the log's commits and the store's times of their entries."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from stepkeeper.errors import DamagedEntryError, MissingObjectError, PinFormatError
from stepkeeper.log import CommitEntry, LogState
from stepkeeper.log.reading import read_entry
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.loggers import logger
from stepkeeper.retention.pins import Pin, PinName, list_pin_names, newest_of, pinned_slots, read_pin
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = [
    "LEASE_COMMITS",
    "LEASE_S",
    "RENEW_EVERY_S",
    "CommitTimes",
    "HeldSlots",
    "PinReport",
    "Times",
    "drop_over",
    "is_over",
    "report_pins",
]

_log: Final = logger(__name__)

LEASE_S: Final = 3600.0
"""How far apart the store must have the second and the last commit that came since a pin was renewed."""

LEASE_COMMITS: Final = 3
"""The least number of commits in a lease: the one before it, and the two that span it at least."""

RENEW_EVERY_S: Final = LEASE_S / 6
"""How often a holder renews its pin, by its own clock. Five renewals in a row may fail."""

Times = Callable[[Collection[int]], Mapping[int, float]]
"""Returns when the commits were put, by slot, that decide about pins whose holders had read up to these slots."""


def is_over(seen: int | None, times_unix_s: Mapping[int, float]) -> bool:
    """Tell whether a lease is over. Pure.

    No clock of a holder or a collector takes part: the times are the store's, of objects that were put after the
    holder had read the log up to `seen`. The first commit's time doesn't count: its entry came after that reading,
    but the file that a folder shows as the entry may have been written, and got its time, long before it.

    Args:
        seen: The last slot that the holder had read when it renewed; None if the pin has no lease.
        times_unix_s: When commits were put into the log, by slot: at least the first two after `seen`, and the newest.

    """
    if seen is None:
        return False
    since = sorted(slot for slot in times_unix_s if slot > seen)
    return len(since) >= LEASE_COMMITS and times_unix_s[since[-1]] - times_unix_s[since[1]] >= LEASE_S


class CommitTimes:
    """Know when commits were put into the log, by the store's own clock. One thread at a time uses it.

    Entries stay for ever. So whoever asks, and after however many restarts, is told the same.
    """

    def __init__(self, store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        self._store = store
        self._patience = patience
        self._times = StoreTimes(store, patience=patience)
        self._scans: dict[int, _Scan] = {}

    def read(self, state: LogState, seen: Collection[int]) -> Mapping[int, float]:
        """Return the times of the commits that leases go by, by slot, as far as the store says.

        These are the first two after each slot in `seen`, and the newest one.

        Args:
            state: The log.
            seen: The last slots that holders of pins had read.

        Raises:
            StorageError: The store gave no answer.

        """
        newest = max(state.commits, default=-1)
        behind = [slot for slot in seen if slot < newest]
        if not behind:
            return {}
        self._scans = {slot: self._find_first(slot, newest) for slot in behind}
        slots = {newest}.union(*(scan.found for scan in self._scans.values()))
        times = {slot: self._times.of_entry(slot) for slot in slots}
        return {slot: time_unix_s for slot, time_unix_s in times.items() if time_unix_s is not None}

    def _find_first(self, seen: int, newest: int) -> "_Scan":
        """Find the first two commits after the slot `seen`, and before `newest`."""
        scan = self._scans.get(seen, _Scan(next=seen + 1))
        while len(scan.found) < LEASE_COMMITS - 1 and scan.next < newest:
            is_commit = self._is_commit(scan.next)
            found = (*scan.found, scan.next) if is_commit else scan.found
            scan = _Scan(next=scan.next + 1, found=found)
        return scan

    def _is_commit(self, slot: int) -> bool:
        try:
            return isinstance(self._patience.retry(partial(read_entry, self._store, slot)).body, CommitEntry)
        except (DamagedEntryError, MissingObjectError):
            # The lease is longer for that by a commit, and no reader needs this entry.
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    """The search for commits in the entries after a slot, as far as it has come."""

    next: int
    found: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PinReport:
    """A pin as people are told of it."""

    name: PinName
    """Its name since the last renewal; `time_unix_s` is when that was."""

    pin: Pin | None
    """None: it can't be read, but counts."""

    is_over: bool
    """True if the next collection removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlots:
    """The commits whose data must stay, and the pins that are garbage."""

    slots: frozenset[int]
    over: tuple[str, ...] = ()
    """Paths of pins whose lease is over, renewals too. They were removed, unless only looked at."""


def drop_over(
    store: Store,
    times_unix_s: Times,
    *,
    dry_run: bool = False,
    patience: Patience = DEFAULT_PATIENCE,
) -> HeldSlots:
    """List the pins, and remove those whose lease is over.

    A holder that comes back and renews at the same time either finds its pin gone, or is found here: then the
    commit's data stays.

    Args:
        store: The root.
        times_unix_s: Asked for the times of commits, if any pin has a lease.
        dry_run: Remove nothing.
        patience: How long to wait for answers.

    """
    names = list_pin_names(store, patience=patience)
    pins = newest_of(names)
    seen = frozenset(pin.seen for pin in pins if pin.seen is not None)
    times = times_unix_s(seen) if seen else {}
    over = {pin.text: pin for pin in pins if is_over(pin.seen, times)}
    held = frozenset(pin.slot for pin in pins if pin.text not in over)
    # Only these: a name that comes now is of a holder that is back.
    doomed = [name for name in names if name.text in over]
    paths = tuple(name.path for name in doomed)
    if dry_run or not over:
        return HeldSlots(slots=held, over=paths)
    for path in paths:
        patience.retry(partial(store.delete, path))
    # Who renewed before its pin was removed believes to hold it. Its new name is listed now.
    held |= pinned_slots(store, patience=patience)
    for text in over:
        _log.warning("removed pin %s of %s: it was not renewed for a whole lease", text, store.uri)
    return HeldSlots(slots=held, over=paths)


def report_pins(
    store: Store,
    times_unix_s: Times,
    *,
    patience: Patience = DEFAULT_PATIENCE,
) -> tuple[PinReport, ...]:
    """List all pins, by slot, also those that can't be read.

    Args:
        store: The root.
        times_unix_s: Returns when commits were put.
        patience: How long to wait for answers.

    """
    names = newest_of(list_pin_names(store, patience=patience))
    times = times_unix_s(frozenset(name.seen for name in names if name.seen is not None))
    found = []
    for name in names:
        try:
            pin = read_pin(store, name, patience=patience)
        except PinFormatError:
            pin = None
        found.append(PinReport(name=name, pin=pin, is_over=is_over(name.seen, times)))
    return tuple(found)
