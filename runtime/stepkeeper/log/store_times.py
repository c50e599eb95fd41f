"""Find out when objects were put into a root, by the store's own clock, and how often its training was restarted.

Keeping commits by age needs it, and the estimate of how often a training is disrupted.
"""

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
"""The most begins that are looked back at: two small reads each, while the training starts."""


class StoreTimes:
    """Ask the store when objects were put, once for each object."""

    def __init__(self, store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        self._store = store
        self._patience = patience
        self._known: dict[int, float] = {}
        self._entries: dict[int, float] = {}

    def of_commits(self, commits: Iterable[CommitRecord]) -> dict[int, float]:
        """Return, by slot, when each of `commits` was written, as far as the store says. Raises StorageError."""
        found = {}
        for record in commits:
            # Rank 0's manifest is put just before the entry, and isn't in a folder of many thousand objects.
            known = self._known.get(record.slot)
            time_unix_s = known or self._time_of(f"{record.folder}/{record.manifest.path}")
            if time_unix_s is not None:
                found[record.slot] = time_unix_s
        self._known = found
        return found

    def between_s(self, first: int, last: int) -> int | None:
        """Return the seconds between the entries at slots `first` and `last`.

        None: the store doesn't say, or gives no answer.
        """
        try:
            first_s, last_s = self.of_entry(first), self.of_entry(last)
        except StorageError as error:
            _log.warning("how long %s has been trained to can't be told: %s", self._store.uri, error)
            return None
        return None if first_s is None or last_s is None else max(0, int(last_s - first_s))

    def of_entry(self, slot: int) -> float | None:
        """Return when the entry at `slot` was put; None if the store doesn't say. Raises StorageError."""
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
    """The past of a training, up to a claim of its root."""

    restarts: int
    """The number of times that a process has gone on from where another one had ended."""

    over_s: int | None
    """The seconds over which these happened. None: the store doesn't say when things were put."""


def read_restart_history(
    entry: Callable[[int], Entry], times: StoreTimes, claim: int
) -> RestartHistory | None:
    """Read the past of the job that `claim` is of. If the log can't be read, warn and return None."""
    try:
        restarts, first = _restarts_before(entry, claim)
    except (StorageError, LogFormatError) as error:  # the claim stands without it: it is for an estimate only
        _log.warning("how often this training was restarted can't be told: %s", error)
        return None
    return RestartHistory(restarts=restarts, over_s=times.between_s(first, claim) if restarts else 0)


def _restarts_before(entry: Callable[[int], Entry], claim: int) -> tuple[int, int]:
    """Count the restarts of the claim's job, and return with the count the slot of the begin that it counts from."""
    restarts, first, begin = 0, claim, _begin_in(entry(claim))
    for _ in range(_MOST):
        if first == 0:
            break
        before = entry(first - 1)
        earlier = _begin_in(entry(before.claim))
        if _job_of(earlier) != _job_of(begin):
            break
        restarts += _is_restart(begin, earlier, before.after.head)
        first, begin = before.claim, earlier
    return restarts, first


def _is_restart(begin: BeginEntry, earlier: BeginEntry, head: int | None) -> bool:
    """Tell whether `begin` goes on from where `earlier` had come to, which is `head`.

    It doesn't if somebody chose its base, or if both are claims of one start.
    """
    if begin.scratch or (begin.owner is not None and begin.owner == earlier.owner):
        return False
    return begin.base == head and (head is not None or begin.legacy == earlier.legacy)


def _job_of(begin: BeginEntry) -> str | None:
    return None if begin.owner is None else begin.owner.name


def _begin_in(entry: Entry) -> BeginEntry:
    assert isinstance(entry.body, BeginEntry), "a claim is the slot of a begin"
    return entry.body
