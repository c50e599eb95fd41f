"""Find out when objects were put into a root, by the store's clock, and how often training restarted."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from stepkeeper.errors import LogFormatError, StorageError
from stepkeeper.log import BeginEntry, CommitRecord, Entry
from stepkeeper.log.tail import slot_path
from stepkeeper.loggers import logger
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["RestartHistory", "StoreTimes", "read_restart_history"]

_log: Final = logger(__name__)
_MOST: Final = 16
"""The most begins to look back at. Each takes two small reads while the training starts."""


class StoreTimes:
    """Ask the store when objects were put, once for each object."""

    def __init__(self, store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        self._store = store
        self._patience = patience
        self._known: dict[int, float] = {}
        self._entries: dict[int, float] = {}

    def of_commits(self, commits: Iterable[CommitRecord]) -> dict[int, float]:
        """Return, by slot, when each of `commits` was written, as far as the store reports it. Raises StorageError."""
        found = {}
        for record in commits:
            # Rank 0's manifest is put just before the entry, in a folder without many thousand objects.
            path = f"{record.folder}/{record.manifest.path}"
            time_unix_s = self._known.get(record.slot) or self._time_of(path)
            if time_unix_s is not None:
                found[record.slot] = time_unix_s
        # Deleted commits are forgotten.
        self._known = found
        return found

    def between_s(self, first: int, last: int) -> int | None:
        """Return the seconds between the entries at slots `first` and `last`; None if the store can't say."""
        try:
            first_s, last_s = self.of_entry(first), self.of_entry(last)
        except StorageError as error:
            _log.warning("the training time of %s is unknown: %s", self._store.uri, error)
            return None
        return None if first_s is None or last_s is None else max(0, int(last_s - first_s))

    def of_entry(self, slot: int) -> float | None:
        """Return when the entry at `slot` was put; None if the store doesn't report it. Raises StorageError."""
        if slot not in self._entries:
            time_unix_s = self._time_of(slot_path(slot))
            if time_unix_s is None:
                return None
            self._entries[slot] = time_unix_s
        return self._entries[slot]

    def _time_of(self, path: str) -> float | None:
        stats = self._patience.retry(partial(self._store.list, path))
        return next((stat.time_unix_s for stat in stats if stat.path == path), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHistory:
    """The restarts of a training, up to a claim of its root."""

    restarts: int
    """The number of times that a process continued from where another one had ended."""

    over_s: int | None
    """The seconds over which these happened. None: the store doesn't report times."""


def read_restart_history(
    entry: Callable[[int], Entry], times: StoreTimes, claim: int
) -> RestartHistory | None:
    """Read the restarts of the claim's job. If the log can't be read, log a warning and return None."""
    try:
        restarts, first = _restarts_before(entry, claim)
    except (StorageError, LogFormatError) as error:  # the claim doesn't need it: it is only for an estimate
        _log.warning("the number of restarts of this training is unknown: %s", error)
        return None
    return RestartHistory(restarts=restarts, over_s=times.between_s(first, claim) if restarts else 0)


def _restarts_before(entry: Callable[[int], Entry], claim: int) -> tuple[int, int]:
    """Count the restarts of the claim's job. Return the count, and the slot of the first begin in it."""
    restarts, first, begin = 0, claim, _begin_in(entry(claim))
    for _ in range(_MOST):
        if first == 0:
            break
        # The last entry before this begin belongs to the claim before it.
        before = entry(first - 1)
        earlier = _begin_in(entry(before.claim))
        if _job_of(earlier) != _job_of(begin):
            break
        restarts += _is_restart(begin, earlier, before.after.head)
        first, begin = before.claim, earlier
    return restarts, first


def _is_restart(begin: BeginEntry, earlier: BeginEntry, head: int | None) -> bool:
    """Return True if `begin` continues from where `earlier` had ended, which is `head`.

    It doesn't if a user chose its base, or if both are claims of one start.
    """
    if begin.scratch or (begin.owner is not None and begin.owner == earlier.owner):
        return False
    return begin.base == head and (head is not None or begin.legacy == earlier.legacy)


def _job_of(begin: BeginEntry) -> str | None:
    return None if begin.owner is None else begin.owner.name


def _begin_in(entry: Entry) -> BeginEntry:
    assert isinstance(entry.body, BeginEntry), "a claim is the slot of a begin"
    return entry.body
