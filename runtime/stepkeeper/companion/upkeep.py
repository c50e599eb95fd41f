"""Do the upkeep after a commit: verify it, delete commits that retention doesn't keep, and leftovers of earlier claims.

A commit is deleted in the log first, and its data after that, unless a pin (a reader's hold on the data) protects it.
"""

import traceback
from collections.abc import Callable, Mapping
from functools import partial

from stepkeeper.checkpoint.finishing import FinishedCheckpoint, verify_objects
from stepkeeper.companion.background import BackgroundTask, run_in_thread
from stepkeeper.errors import StepkeeperError, VerifyError
from stepkeeper.log import Claim, CommitRecord, Log
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.policy.keep import Keep
from stepkeeper.retention.deletable import choose_deletable
from stepkeeper.retention.garbage import Garbage, collect, sweep
from stepkeeper.retention.leases import leases_by
from stepkeeper.storage import Store
from stepkeeper.storage.retry import Patience

__all__ = ["CommitUpkeep"]


class CommitUpkeep:
    """Verify commits and delete data. The tasks run in the log's thread, except for their blocking calls."""

    def __init__(
        self,
        log: Log,
        store: Store,
        times: StoreTimes,
        keep: Keep | None,
        require_claim: Callable[[], Claim],
        *,
        on_complaint: Callable[[str | None], None],
        on_end: Callable[[], None],
        patience: Patience,
    ) -> None:
        """Store the arguments; nothing is read yet.

        `keep` has the commits to keep; None: no commit is ever deleted. `require_claim` returns this process's claim.
        `on_complaint` is called with each new failure of these tasks, and with None once they succeed again; `on_end`
        at the end of the upkeep after each commit. `patience` limits the retries of requests to the store.
        """
        self._log = log
        self._store = store
        self._times = times
        self._keep = keep
        self._require_claim = require_claim
        self._patience = patience
        self._on_complaint = on_complaint
        self._on_end = on_end
        self.complaint: str | None = None
        """The newest failure of the upkeep; None once it succeeded again."""

        self._verified: set[int] = set()
        """Slots of the commits that this process has verified."""

        self._folders: dict[int, str] = {}
        """Folders by slot, of commits whose data may still exist, even after their deletion in the log."""

        self._has_collected = False
        """True once the leftovers of earlier claims are deleted."""

    def work_after_commit(self, record: CommitRecord, finished: FinishedCheckpoint) -> BackgroundTask:
        """Verify the commit, then delete all deletable data. The next commit's upkeep retries what failed."""
        try:
            yield from self._verify_commit(record, finished)
            yield from self._delete_unkept()
            if not self._has_collected:
                yield from self._collect_garbage()
            self._set_complaint(None)
        except Exception as error:  # the commit is valid, and the next save needs this process
            self._report_failure(f"after the commit of step {record.step}", error)
        self._on_end()

    def make_room(self) -> BackgroundTask:
        """Delete all deletable data, without a commit before."""
        try:
            yield from self._delete_unkept()
            yield from self._collect_garbage()
        except Exception as error:  # the save fails for lack of room, and raises that error
            self._report_failure("room could not be made", error)

    def _verify_commit(self, record: CommitRecord, finished: FinishedCheckpoint) -> BackgroundTask:
        """Check that the store holds the written objects.

        Raises VerifyError if it doesn't, or FencedError if a later claim owns the root.
        """
        if record.slot not in self._log.state.commits:
            # Retention has deleted this commit already, after a later one.
            return
        try:
            yield from run_in_thread(partial(verify_objects, self._store, finished, patience=self._patience))
        except VerifyError:
            # A later claim may have deleted the objects: that is a fence (FencedError), no damage.
            self._log.resume(self._require_claim())
            raise
        self._verified.add(record.slot)

    def _delete_unkept(self) -> BackgroundTask:
        """Delete the commits that retention doesn't keep, first in the log, then their data unless a pin protects it.

        This includes the data of earlier deletions that were interrupted, or whose pins are gone.
        """
        keep = self._keep
        times_unix_s: Mapping[int, float] = {}
        if keep is not None and keep.needs_times:
            times_unix_s = yield from run_in_thread(partial(self._times.of_commits, self._log.state.line))
        # This comes after the blocking call, because commits made during the call may be deleted too.
        self._folders |= {slot: record.folder for slot, record in self._log.state.commits.items()}
        if keep is not None:
            policy = keep.policy
            self._log.delete(
                self._require_claim(),
                lambda state: choose_deletable(state, policy, self._verified, times_unix_s),
            )
        commits = self._log.state.commits
        deleted = [Garbage(folder=f, slot=slot) for slot, f in self._folders.items() if slot not in commits]
        # What is deleted in the log stays so: a pin that comes after this point finds that it is too late.
        is_over = leases_by(self._times, self._log.state.tail)
        left = yield from run_in_thread(
            partial(sweep, self._store, deleted, is_over=is_over, patience=self._patience)
        )
        # Pinned data is left; the next upkeep tries again.
        for slot in {each.slot for each in deleted} - {each.slot for each in left}:
            assert slot is not None
            del self._folders[slot]

    def _collect_garbage(self) -> BackgroundTask:
        """Delete leftovers of earlier claims. Pinned data is deleted once its pins are gone."""
        state = self._log.refresh()
        report = yield from run_in_thread(
            partial(
                collect,
                state,
                self._log.entry,
                self._store,
                is_over=leases_by(self._times, state.tail),
                patience=self._patience,
            )
        )
        self._folders |= {each.slot: each.folder for each in report.pinned if each.slot is not None}
        self._has_collected = True

    def _report_failure(self, what: str, error: Exception) -> None:
        self._set_complaint(f"{what}: {error!r}")
        if not isinstance(error, StepkeeperError):
            traceback.print_exception(error)

    def _set_complaint(self, text: str | None) -> None:
        """Report a failure of the upkeep; None once it succeeded again."""
        if text != self.complaint:
            self._on_complaint(text)
        self.complaint = text
