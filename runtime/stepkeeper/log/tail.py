"""Where the log ends: which slot is the greatest."""

import re
from collections.abc import Sequence
from typing import Final

from stepkeeper.errors import LogGapError, MissingObjectError
from stepkeeper.storage.base import LOG_PREFIX, ObjectStat, PagedStore, Store
from stepkeeper.storage.retry import Patience

__all__ = ["LOG_PREFIX", "PAGE", "find_tail", "slot_path"]

PAGE: Final = 1000
"""Slots in one answer of a listing. No answer of Cloud Storage's has more."""

_NAME: Final = re.compile(r"([0-9]{8,})\.json")


def slot_path(slot: int) -> str:
    return f"{LOG_PREFIX}{slot:08d}.json"


def find_tail(store: Store, patience: Patience) -> int:
    """The greatest slot, or one that was the greatest during this call; -1: the log is empty.

    A log of up to PAGE slots is listed. Of a longer one, where the store lists from a given name on, the end is
    searched for: by steps that double, then by halving, until a page is the last one. That is about
    2 * log2(slots / PAGE) pages. What comes after the slot that is answered is known not to be there, so no slot is
    ever put behind a gap; a gap before it is noticed where a page that was looked at has it, the first one always.

    Raises LogGapError.
    """
    if not isinstance(store, PagedStore):
        return _last_of_all(store, patience)
    start, known = 0, -1
    nothing_from: int | None = None
    while True:
        page = _page(store, patience, start)
        slots = _slots(page)
        if slots:
            known = _last_of(store, patience, slots, start)
            if len(page) < PAGE:
                return known
        elif len(page) == PAGE:
            # More names that are no slots than a page holds: paging isn't made for that.
            return _last_of_all(store, patience)
        elif start <= known + 1:
            return known
        else:
            nothing_from = start
        start = _next_start(known, nothing_from)


def _next_start(known: int, nothing_from: int | None) -> int:
    """Where to look next: `known` is there, nothing is from `nothing_from` on."""
    if nothing_from is None:
        return 2 * (known + 1)
    if nothing_from - known <= PAGE:
        return known + 1
    return (known + nothing_from) // 2


def _page(store: PagedStore, patience: Patience, start: int) -> Sequence[ObjectStat]:
    return patience.retry(lambda: store.list_page(LOG_PREFIX, slot_path(start), PAGE))


def _last_of_all(store: Store, patience: Patience) -> int:
    return _last_of(store, patience, _slots(patience.retry(lambda: store.list(LOG_PREFIX))), 0)


def _slots(found: Sequence[ObjectStat]) -> list[int]:
    """What is `found`, without names that are no slots: these are no business of the log."""
    names = (_NAME.fullmatch(stat.path.removeprefix(LOG_PREFIX)) for stat in found)
    return sorted(int(name[1]) for name in names if name and f"{int(name[1]):08d}" == name[1])


def _last_of(store: Store, patience: Patience, slots: Sequence[int], start: int) -> int:
    """The last of `slots`, which were found from `start` on."""
    for expected, slot in enumerate(slots, start):
        if slot != expected:
            _check_no_gap(store, patience, expected)
            # It came while the listing was made: so may others have. The caller reads on from here.
            return expected
    return start + len(slots) - 1


def _check_no_gap(store: Store, patience: Patience, slot: int) -> None:
    try:
        patience.retry(lambda: store.read(slot_path(slot), 0, 1))
    except MissingObjectError:
        raise LogGapError(
            f"{store.uri}/{slot_path(slot)} is gone, later slots are there: something deletes from the "
            "log (a lifecycle rule, a clean-up job?). Put it back, from object versions or soft delete"
        ) from None
