"""Find the pins whose lease is over. Leases run by the log's entries and the store's times of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from stepkeeper.errors import PinFormatError
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.loggers import logger
from stepkeeper.retention.pins import Pin, PinName, list_pin_names, newest_of, pinned_slots, read_pin
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = [
    "LEASE_ENTRIES",
    "LEASE_S",
    "RENEW_EVERY_S",
    "HeldSlots",
    "IsOver",
    "PinReport",
    "drop_over",
    "lease_is_over",
    "leases_by",
    "report_pins",
]

_log: Final = logger(__name__)

LEASE_S: Final = 3600.0
"""The lease: the time between the second and the last entry since a pin was renewed, by the store's clock."""

LEASE_ENTRIES: Final = 4
"""The least number of entries in a lease, so that one save and its deletion never end one."""

RENEW_EVERY_S: Final = LEASE_S / 6
"""How often a holder renews its pin, by its own clock. Five renewals in a row may fail."""

IsOver = Callable[[int | None], bool]
"""Returns whether the lease of a pin is over, from the last slot that its holder had read."""


def lease_is_over(seen: int | None, tail: int, time_of: Callable[[int], float | None]) -> bool:
    """Return whether a pin's lease is over. `seen` is the last slot that its holder had read; None: no lease.

    The clocks of holders and collectors aren't used: the times are the store's, of entries that were put
    after the holder had read the log. The first one's time doesn't count: in a folder, the entry's file may
    have been written, and got its time, long before it became the entry. Pure.
    """
    if seen is None or tail < seen + LEASE_ENTRIES:
        return False
    second_s, last_s = time_of(seen + 2), time_of(tail)
    return second_s is not None and last_s is not None and last_s - second_s >= LEASE_S


def leases_by(times: StoreTimes, tail: int) -> IsOver:
    """Return the check of leases by a log that ends at slot `tail`. Entries stay forever: so do its answers."""
    return partial(lease_is_over, tail=tail, time_of=times.of_entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinReport:
    """A pin as reported to users."""

    name: PinName
    """Its name since the last renewal; `time_unix_s` is when that was."""

    pin: Pin | None
    """None: it can't be read, but still holds."""

    is_over: bool
    """True if the next collection removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlots:
    """The commits whose data must stay, and the pins that are garbage."""

    slots: frozenset[int]
    over: tuple[str, ...] = ()
    """Paths of pins whose lease is over, renewals too. They were removed, except in a dry run."""


def drop_over(
    store: Store, is_over: IsOver, *, dry_run: bool = False, patience: Patience = DEFAULT_PATIENCE
) -> HeldSlots:
    """List the pins, and remove those whose lease is over.

    A holder that returns and renews at the same time either finds its pin gone, or its renewal is found here:
    then the commit's data stays.
    """
    names = list_pin_names(store, patience=patience)
    pins = newest_of(names)
    over = {pin.text for pin in pins if is_over(pin.seen)}
    held = frozenset(pin.slot for pin in pins if pin.text not in over)
    # Only these: a name that appears now is of a holder that has returned.
    doomed = [name for name in names if name.text in over]
    paths = tuple(name.path for name in doomed)
    if dry_run or not over:
        return HeldSlots(slots=held, over=paths)
    for path in paths:
        patience.retry(partial(store.delete, path))
    # A holder that renewed before its pin was removed relies on the pin. Its new name is listed now.
    held |= pinned_slots(store, patience=patience)
    for text in sorted(over):
        _log.warning("removed pin %s of %s: it was not renewed for a whole lease", text, store.uri)
    return HeldSlots(slots=held, over=paths)


def report_pins(
    store: Store, is_over: IsOver, *, patience: Patience = DEFAULT_PATIENCE
) -> tuple[PinReport, ...]:
    """List all pins, by slot, also those that can't be read."""
    names = newest_of(list_pin_names(store, patience=patience))
    found = []
    for name in names:
        try:
            pin = read_pin(store, name, patience=patience)
        except PinFormatError:
            pin = None
        found.append(PinReport(name=name, pin=pin, is_over=is_over(name.seen)))
    return tuple(found)
