"""Name the slots of a log, read their entries, and find the greatest of them."""

import re
from collections.abc import Sequence
from typing import Final

from stepkeeper.errors import DamagedEntryError, LogGapError, MissingObjectError
from stepkeeper.log.entries import Entry
from stepkeeper.storage.base import LOG_PREFIX, ObjectStat, PagedStore, ReopenableStore, Store
from stepkeeper.storage.retry import Patience

__all__ = [
    "LOG_PREFIX",
    "PAGE",
    "find_tail",
    "gap_at",
    "listed_slots",
    "read_entry",
    "read_over_new_connection",
    "slot_of",
    "slot_path",
]

PAGE: Final = 1000
"""The most slots in one answer of a listing. No answer of Cloud Storage has more."""

_MILESTONE: Final = 512
"""Slots that are multiples of this have names that sort before all others, so that the end is found quickly."""

_READINGS: Final = 3
"""How often an entry is read before it counts as damaged: bytes corrupted in transit are intact in the store."""

_NAME: Final = re.compile(r"(?:0-)?([0-9]{8,})\.json")


def slot_path(slot: int) -> str:
    """Return the path of a slot's object."""
    return f"{LOG_PREFIX}0-{slot:08d}.json" if _is_milestone(slot) else _plain_path(slot)


def slot_of(path: str) -> int | None:
    """Return the slot of the object at this path; None if it isn't a slot."""
    name = _NAME.fullmatch(path.removeprefix(LOG_PREFIX))
    return int(name[1]) if name and path == slot_path(int(name[1])) else None


def _is_milestone(slot: int) -> bool:
    return slot > 0 and slot % _MILESTONE == 0


def _plain_path(slot: int) -> str:
    return f"{LOG_PREFIX}{slot:08d}.json"


def read_entry(store: Store, slot: int) -> Entry:
    """Read the entry in `slot`. If its bytes are bad, read it twice more over new connections.

    Raises MissingObjectError, DamagedEntryError if the bytes were bad in every read, LogFormatError if a
    newer release has written it, TransientStorageError, which proves nothing.
    """
    where = f"{store.uri}/{slot_path(slot)}"
    found: DamagedEntryError | None = None
    for number in range(_READINGS):
        try:
            data = read_over_new_connection(store, slot_path(slot)) if number else store.read(slot_path(slot))
            return Entry.from_json(data, where)
        except DamagedEntryError as error:
            found = error
    root = store.uri.rstrip("/")
    fault = str(found).removeprefix(where).strip()
    raise DamagedEntryError(
        f"{where}: slot {slot} of the log of {root} {fault} (read {_READINGS} times). Put the object back from "
        f"object versions or a copy; without one, see what can be rebuilt: stepkeeper repair {root}"
    ) from found


def read_over_new_connection(store: Store, path: str) -> bytes:
    """Read an object over a new connection, if the store can open one."""
    if not isinstance(store, ReopenableStore):
        return store.read(path)
    fresh = store.reopen()
    try:
        return fresh.read(path)
    finally:
        fresh.close()


def find_tail(store: Store, patience: Patience) -> int:
    """Find the greatest slot, or one that was the greatest during this call; -1 if the log is empty.

    A log of up to PAGE slots is listed. Of a longer one, only the milestones and the slots after the last of them are
    listed, if the store can list from a given name on. The slot after the answer is known to be empty, so no slot is
    ever put after a gap. An earlier gap is noticed only on the listed pages, which always include the first slots.

    Raises LogGapError.
    """
    if not isinstance(store, PagedStore):
        return _last_of_all(store, patience)
    page = _page(store, patience, LOG_PREFIX)
    slots = listed_slots(page)
    if len(page) < PAGE:
        return _last_of(store, patience, slots, 0)
    if all(map(_is_milestone, slots)):
        # A page full of milestones, or of names that are no slots: paging handles neither.
        return _last_of_all(store, patience)
    return _last_after(store, patience, _last_of_first(store, patience, slots))


def _last_of_first(store: Store, patience: Patience, slots: Sequence[int]) -> int:
    """Find the last of the log's first page: all milestones, and the first of the other slots."""
    milestones = [slot for slot in slots if _is_milestone(slot)]
    for expected, slot in enumerate(milestones, 1):
        if slot != expected * _MILESTONE:
            _check_no_gap(store, patience, expected * _MILESTONE)
    # Up to the last of the others, the page has every slot; after that only milestones.
    others = max(slot for slot in slots if not _is_milestone(slot))
    last = _last_of(store, patience, [slot for slot in slots if slot <= others], 0)
    return max(last, *milestones) if milestones else last


def _last_after(store: PagedStore, patience: Patience, known: int) -> int:
    """Find the last slot, page by page. `known` exists; milestones after it are new."""
    while True:
        page = _page(store, patience, _plain_path(known + 1))
        slots = listed_slots(page)
        if slots:
            known = _last_of(store, patience, slots, known + 1)
        if len(page) < PAGE:
            return known
        if not slots:
            # A page full of names that are no slots.
            return _last_of_all(store, patience)


def _page(store: PagedStore, patience: Patience, start: str) -> Sequence[ObjectStat]:
    return patience.retry(lambda: store.list_page(LOG_PREFIX, start, PAGE))


def _last_of_all(store: Store, patience: Patience) -> int:
    return _last_of(store, patience, listed_slots(patience.retry(lambda: store.list(LOG_PREFIX))), 0)


def listed_slots(found: Sequence[ObjectStat]) -> list[int]:
    """List the slots among these objects. Other names are ignored."""
    slots = (slot_of(stat.path) for stat in found)
    return sorted(slot for slot in slots if slot is not None)


def _last_of(store: Store, patience: Patience, slots: Sequence[int], start: int) -> int:
    """Find the last of `slots`, a listing of all from `start` on. Raises LogGapError if one is missing."""
    for expected, slot in enumerate(slots, start):
        if slot != expected:
            _check_no_gap(store, patience, expected)
            # The slot was put during the listing, and others may have been. The caller continues from here.
            return expected
    return start + len(slots) - 1


def _check_no_gap(store: Store, patience: Patience, slot: int) -> None:
    try:
        patience.retry(lambda: store.read(slot_path(slot), 0, 1))
    except MissingObjectError:
        raise gap_at(store, slot) from None


def gap_at(store: Store, slot: int) -> LogGapError:
    """Build the error for a slot that is empty although later ones aren't."""
    return LogGapError(
        f"{store.uri}/{slot_path(slot)} is gone, but later slots exist: something deletes from the "
        "log (a lifecycle rule, a clean-up job?). Put it back, from object versions or soft delete; without those, "
        f"see what can be rebuilt: stepkeeper repair {store.uri.rstrip('/')}"
    )
