"""Find out when objects were put into a root, by the store's own clock.

Keeping commits by age needs it, and the estimate of how often a training is disrupted.
"""

from collections.abc import Iterable
from functools import partial
from typing import Final

from stepkeeper.errors import StorageError
from stepkeeper.log import CommitRecord
from stepkeeper.log.tail import slot_path
from stepkeeper.loggers import logger
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["StoreTimes"]

_log: Final = logger(__name__)


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
