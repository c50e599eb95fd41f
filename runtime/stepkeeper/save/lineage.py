"""Remember what this process has restored and committed, and so what its next save continues from."""

from collections.abc import Mapping

from stepkeeper.companion.supervisor import Companion, Origin
from stepkeeper.log import CommitRecord
from stepkeeper.log.claims import is_continued
from stepkeeper.log.foreign_steps import ForeignRecord, Restorable
from stepkeeper.save.given_state import name_entries
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["Lineage"]


class Lineage:
    """The restored commit, this process's newest one, and the base of the next claim."""

    def __init__(self, companion: Companion) -> None:
        """Start with nothing restored or committed. `companion` knows the root's claim."""
        self._companion = companion
        self._restored: Restorable | None = None
        self._restored_names: frozenset[str] | None = None
        """The entries of the last state that was restored whole; None if none was."""

        self.origin: Origin | None = None
        """The base of the next claim; None for HEAD."""

        self.own_commit: CommitRecord | None = None
        """The newest commit of this process."""

    @property
    def restored_commit(self) -> CommitRecord | None:
        """The commit that was restored last; None if none was, or another writer's step."""
        return self._restored if isinstance(self._restored, CommitRecord) else None

    def is_continued(self, state: Mapping[str, object]) -> bool:
        """Return True if all that a save of `state` holds was restored here: see `log.claims.is_continued`."""
        return is_continued(self._restored_names, name_entries(state))

    def mark_latest_restored(
        self, record: Restorable | None, state: Mapping[str, object], rules: LoadRules
    ) -> None:
        """Note that the root is claimed, and that `state` was restored from HEAD; see `Saver.mark_latest_restored`."""
        # A restored part doesn't change what the next save continues from.
        if rules.selects_all:
            claimed = self._companion.claimed_root
            # The claim of an earlier save that began a branch, and perhaps has no commit, doesn't continue from HEAD.
            leaves_head = claimed is not None and claimed.branching
            self.origin = _origin_of(record) if leaves_head and record is not None else None
        if rules.is_whole:
            self._restored_names = name_entries(state)
        self._restored = record

    def mark_restored(self, record: Restorable, state: Mapping[str, object], rules: LoadRules) -> None:
        """Note that `record` was restored, wherever HEAD is; see `Saver.mark_restored`."""
        # A restored part counts only if this process has no other base.
        if rules.selects_all or (self.origin is None and self._companion.claimed_root is None):
            self.origin = _origin_of(record)
        if rules.is_whole:
            self._restored_names = name_entries(state)
        self._restored = record


def _origin_of(record: Restorable) -> Origin:
    return Origin(record.base if isinstance(record, ForeignRecord) else record.slot)
