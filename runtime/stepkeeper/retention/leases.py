"""Find the pins whose holders are gone: a lease runs by the commits of the line and the store's own times of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from stepkeeper.errors import PinFormatError
from stepkeeper.log import LogState
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.loggers import logger
from stepkeeper.retention.pins import Pin, PinName, list_pin_names, newest_of, pinned_slots, read_pin
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = [
    "LEASE_COMMITS",
    "LEASE_S",
    "RENEW_EVERY_S",
    "HeldSlots",
    "PinReport",
    "VerifiedTimes",
    "drop_over",
    "is_over",
    "report_pins",
]

_log: Final = logger(__name__)

LEASE_S: Final = 3600.0
"""How far apart the store must have the second and the last commit that came since a pin was renewed."""

LEASE_COMMITS: Final = 3
"""The least number of verified commits in a lease: the one before it, and the two that span it at least."""

RENEW_EVERY_S: Final = LEASE_S / 6
"""How often a holder renews its pin, by its own clock. Five renewals in a row may fail."""


def is_over(seen: int | None, times_unix_s: Mapping[int, float]) -> bool:
    """Tell whether a lease is over. Pure.

    No clock of a holder or a collector takes part: the times are the store's, of objects that were put after the
    holder had read the log up to `seen`. The first commit's time doesn't count: its entry came after that reading,
    but its manifest, which has the time, may have been put long before it.

    Args:
        seen: The last slot that the holder had read when it renewed; None if the pin has no lease.
        times_unix_s: When verified commits were put, by slot.

    """
    if seen is None:
        return False
    since = sorted(slot for slot in times_unix_s if slot > seen)
    return len(since) >= LEASE_COMMITS and times_unix_s[since[-1]] - times_unix_s[since[1]] >= LEASE_S


class VerifiedTimes:
    """Know when verified commits were put, by the store's own clock. One thread at a time uses it."""

    def __init__(self, store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        self._times = StoreTimes(store, patience=patience)
        self._known: dict[int, float] = {}

    def note(self, slot: int, time_unix_s: float | None) -> None:
        """Remember a commit that this process has verified. A time that the store didn't tell counts for nothing."""
        if time_unix_s is None:
            return
        self._known[slot] = time_unix_s
        # Twice the lease is enough to prove that one is over; a training may commit for months.
        while len(self._known) > LEASE_COMMITS:
            oldest = next(iter(self._known))
            if time_unix_s - self._known[oldest] <= 2 * LEASE_S:
                break
            del self._known[oldest]

    def read(self, state: LogState) -> Mapping[int, float]:
        """Return the times of those that were noted, and of those on the line that were ever restored whole.

        Raises StorageError.
        """
        restored = [record for record in state.line if record.verified and record.slot not in self._known]
        return {**self._times.of_commits(restored), **self._known}


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
    times_unix_s: Callable[[], Mapping[int, float]],
    *,
    dry_run: bool = False,
    patience: Patience = DEFAULT_PATIENCE,
) -> HeldSlots:
    """List the pins, and remove those whose lease is over.

    A holder that comes back and renews at the same time either finds its pin gone, or is found here: then the
    commit's data stays.

    Args:
        store: The root.
        times_unix_s: Asked for the times of verified commits, if any pin has a lease.
        dry_run: Remove nothing.
        patience: How long to wait for answers.

    """
    names = list_pin_names(store, patience=patience)
    pins = newest_of(names)
    times = times_unix_s() if any(pin.seen is not None for pin in pins) else {}
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
    times_unix_s: Callable[[], Mapping[int, float]],
    *,
    patience: Patience = DEFAULT_PATIENCE,
) -> tuple[PinReport, ...]:
    """List all pins, by slot, also those that can't be read.

    Args:
        store: The root.
        times_unix_s: Returns when verified commits were put.
        patience: How long to wait for answers.

    """
    times = times_unix_s()
    found = []
    for name in newest_of(list_pin_names(store, patience=patience)):
        try:
            pin = read_pin(store, name, patience=patience)
        except PinFormatError:
            pin = None
        found.append(PinReport(name=name, pin=pin, is_over=is_over(name.seen, times)))
    return tuple(found)
