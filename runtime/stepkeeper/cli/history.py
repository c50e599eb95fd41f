"""Read from a root's objects what the log's state lacks: the entries of claims, and the times of slots."""

import math
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from stepkeeper.cli.root import Root
from stepkeeper.errors import DamagedEntryError
from stepkeeper.log import BeginEntry
from stepkeeper.log.entries import Body
from stepkeeper.log.tail import LOG_PREFIX, slot_of, slot_path
from stepkeeper.storage import ObjectStat

__all__ = ["read_begins", "read_slot_time", "read_slot_times"]

_THREADS: Final = 16


def read_begins(root: Root, claims: Collection[int]) -> dict[int, BeginEntry]:
    """Read the entries of claims, by slot; an empty one if it is damaged, or another entry took its slot."""
    with ThreadPoolExecutor(_THREADS) as pool:
        bodies = dict(zip(claims, pool.map(lambda claim: _read_body(root, claim), claims), strict=True))
    return {claim: body if isinstance(body, BeginEntry) else BeginEntry() for claim, body in bodies.items()}


def _read_body(root: Root, slot: int) -> Body | None:
    """Read the body of a slot's entry; None if it is damaged, as some are in a repaired log."""
    try:
        return root.log.entry(slot).body
    except DamagedEntryError:
        return None


def read_slot_times(root: Root) -> dict[int, float]:
    """Read when each slot was put, in seconds since 1970 by the store's clock; slots of unknown time are left out.

    No slot counts as newer than the ones after it: a newer object is a restored copy, or a repair's mark.
    """
    times = _times(root.patience.retry(lambda: root.store.list(LOG_PREFIX)))
    next_unix_s = math.inf
    for slot in sorted(times, reverse=True):
        next_unix_s = times[slot] = min(times[slot], next_unix_s)
    return times


def read_slot_time(root: Root, slot: int) -> dict[int, float]:
    """Read when one slot was put, as `read_slot_times` does."""
    return _times(root.patience.retry(lambda: root.store.list(slot_path(slot))))


def _times(listed: Collection[ObjectStat]) -> dict[int, float]:
    named = ((slot_of(stat.path), stat.time_unix_s) for stat in listed)
    return {slot: time_unix_s for slot, time_unix_s in named if slot is not None and time_unix_s is not None}
