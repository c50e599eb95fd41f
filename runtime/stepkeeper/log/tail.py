"""Find the end of the log: its greatest slot."""

import re
from collections.abc import Sequence
from typing import Final

from stepkeeper.errors import LogGapError, MissingObjectError
from stepkeeper.storage.base import LOG_PREFIX, ObjectStat, PagedStore, Store
from stepkeeper.storage.retry import Patience

__all__ = ["LOG_PREFIX", "PAGE", "find_tail", "gap_at", "listed_slots", "slot_path"]

PAGE: Final = 1000
"""The most slots in one answer of a listing. No answer of Cloud Storage has more."""

_NAME: Final = re.compile(r"([0-9]{8,})\.json")


def slot_path(slot: int) -> str:
    """Return the path of a slot's object."""
    return f"{LOG_PREFIX}{slot:08d}.json"


def find_tail(store: Store, patience: Patience) -> int:
    """Find the greatest slot, or one that was the greatest during this call; -1 if the log is empty.

    A log of up to PAGE slots is listed. The end of a longer one is searched for, if the store can list from a
    given name on: by steps that double, then by halving, until a page is the last one. That takes about 2 *
    log2(slots / PAGE) pages. The slot after the answer is known to be empty, so no slot is ever put behind a
    gap. A gap before it is noticed on the pages that were looked at, of which the first page is always one.

    Raises LogGapError.
    """
    if not isinstance(store, PagedStore):
        return _last_of_all(store, patience)
    start, known = 0, -1
    nothing_from: int | None = None
    while True:
        page = _page(store, patience, start)
        slots = listed_slots(page)
        if slots:
            known = _last_of(store, patience, slots, start)
            if len(page) < PAGE:
                return known
        elif len(page) == PAGE:
            # A page full of names that are no slots: paging isn't made for that.
            return _last_of_all(store, patience)
        elif start <= known + 1:
            return known
        else:
            nothing_from = start
        start = _next_start(known, nothing_from)


def _next_start(known: int, nothing_from: int | None) -> int:
    """Choose where to look next: slot `known` is there, and nothing is from `nothing_from` on."""
    if nothing_from is None:
        return 2 * (known + 1)
    if nothing_from - known <= PAGE:
        return known + 1
    return (known + nothing_from) // 2


def _page(store: PagedStore, patience: Patience, start: int) -> Sequence[ObjectStat]:
    return patience.retry(lambda: store.list_page(LOG_PREFIX, slot_path(start), PAGE))


def _last_of_all(store: Store, patience: Patience) -> int:
    return _last_of(store, patience, listed_slots(patience.retry(lambda: store.list(LOG_PREFIX))), 0)


def listed_slots(found: Sequence[ObjectStat]) -> list[int]:
    """List the slots in what was found. Names that are no slots are no business of the log."""
    names = (_NAME.fullmatch(stat.path.removeprefix(LOG_PREFIX)) for stat in found)
    return sorted(int(name[1]) for name in names if name and f"{int(name[1]):08d}" == name[1])


def _last_of(store: Store, patience: Patience, slots: Sequence[int], start: int) -> int:
    """Find the last of `slots`, which were found from `start` on."""
    for expected, slot in enumerate(slots, start):
        if slot != expected:
            _check_no_gap(store, patience, expected)
            # The slot came while the listing was made, and so may others have. The caller reads on from here.
            return expected
    return start + len(slots) - 1


def _check_no_gap(store: Store, patience: Patience, slot: int) -> None:
    try:
        patience.retry(lambda: store.read(slot_path(slot), 0, 1))
    except MissingObjectError:
        raise gap_at(store, slot) from None


def gap_at(store: Store, slot: int) -> LogGapError:
    """Make the error for a slot that is empty although later ones aren't."""
    return LogGapError(
        f"{store.uri}/{slot_path(slot)} is gone, later slots are there: something deletes from the "
        "log (a lifecycle rule, a clean-up job?). Put it back, from object versions or soft delete; without those, "
        f"see what can be rebuilt: stepkeeper repair {store.uri.rstrip('/')}"
    )
