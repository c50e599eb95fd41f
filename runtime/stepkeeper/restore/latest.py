"""Restore one step, or claim a root and restore its latest commit. If that is torn, condemn it and take its parent."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from stepkeeper.checkpoint.reading import check_metadata
from stepkeeper.companion.messages import ClaimedRoot, Kind, QuarantineRequest, VerifiedNotice
from stepkeeper.companion.supervisor import Companion, Origin
from stepkeeper.contract.wire import decode, encode
from stepkeeper.errors import RestoreError, TornCheckpointError
from stepkeeper.log import CommitRecord, ForeignBase
from stepkeeper.log.foreign_steps import ForeignRecord, Restorable, find_steps, name_record
from stepkeeper.loggers import logger
from stepkeeper.restore.foreign.choosing import choose_foreign_step, choose_newest, find_fault
from stepkeeper.restore.listing import find_settled_step
from stepkeeper.restore.planning import EarlyPlan
from stepkeeper.restore.restorer import WHOLE, Restorer
from stepkeeper.time_limits import CLAIM_S
from stepkeeper_planners.garbage import without_collections
from stepkeeper_planners.loading.load_request import LoadTarget
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["LatestRestore", "restore_step"]

_log: Final = logger(__name__)


class LatestRestore:
    """Restore the checkpoint that HEAD selects, once or several times in one process."""

    def __init__(self, restorer: Restorer, companion: Companion) -> None:
        """Restore by `restorer`; rank 0 asks `companion` to claim the root and to write to its log."""
        self._restorer = restorer
        self._companion = companion
        self._condemned: str | None = None
        """The checkpoint that this process has helped to condemn, and why. It doesn't condemn a second one."""

        companion.choose_foreign_step = partial(choose_foreign_step, restorer.store, restorer.reopen)

    def restore(self, target: LoadTarget, *, rules: LoadRules = WHOLE) -> Restorable | None:
        """Claim the root and restore HEAD's commit into the target's state, or its parent if it is torn.

        Where nothing is committed, restore the newest complete step of another writer, if there is one.

        Returns:
            The restored checkpoint; None if the root holds none.

        Raises:
            FencedError: The root belongs to another job.
            PartlyRestoredError: It failed after it had changed the state.
            RestoreError: There is a commit, but it can't be used.
            BadNodeError: One node reads bad bytes where another one reads good ones.
            LoadMismatchError: The state and the commit differ in names, shapes, dtypes or kinds.
        """
        mixed_state = self._restorer.mixed_state
        with mixed_state.restoring():
            if self._restorer.rank_group.rank == 0:
                self._companion.start_early()
            restored = self._restore(target, rules, self._plan_early(target, rules))
            if restored is not None:
                mixed_state.clear()
            return restored

    def _plan_early(self, target: LoadTarget, rules: LoadRules) -> EarlyPlan | None:
        """Flatten the state, and plan to load the commit that is HEAD now, while the companion starts.

        If that fails, what it was for fails too, once a checkpoint is chosen, and raises on all ranks.
        """
        with suppress(Exception), without_collections():
            target.flat  # noqa: B018  # it is made at the first access
            return self._restorer.plan_early(target, rules)
        return None

    def _restore(
        self, target: LoadTarget, rules: LoadRules, early_plan: EarlyPlan | None
    ) -> Restorable | None:
        choose = self._restorer.votes.choose_in_rank_0
        base = choose(self._claim_and_choose)
        while base is not None:
            reason = self._restorer.load(base, target, rules, early_plan=early_plan)
            early_plan = None  # it has all values of the checkpoint, and perhaps whole blocks
            if reason is None:
                if rules.is_whole:
                    # All of it was read. Only rank 0 writes that into the log; there is nothing to choose.
                    choose(partial(self._note_restored, base))
                return base
            if self._condemned is not None:
                raise RestoreError(
                    f"bytes of two checkpoints were bad in one start: {self._condemned}; and {name_record(base)}: "
                    f"{reason}. A broken node or network is more likely than two bad checkpoints; the second one was "
                    "not condemned"
                )
            self._condemned = f"{name_record(base)}: {reason}"
            text = "%s is torn; loading the one before it instead: %s"
            _log.error(text, name_record(base), reason, extra={"step": base.step})
            base = choose(partial(self._condemn, base, reason))
        if self._condemned is not None:
            raise RestoreError(
                f"there is no checkpoint before the bad one, {self._condemned}. `stepkeeper ls --all` lists the "
                "other commits; stepkeeper.log.Log(store).begin(base=SEQUENCE, take_over=True) lets the next start "
                "resume from one"
            )
        return None

    def _claim_and_choose(self) -> Restorable | None:
        """Claim the root in rank 0, and return the checkpoint that HEAD selects."""
        base = self._companion.read_latest()
        if isinstance(base, ForeignBase):
            _log.warning(
                "nothing is committed in %s: resuming from another writer's step %d (%s)%s",
                self._restorer.store.uri,
                base.step,
                base.folder,
                "" if base.reason is None else f", since {base.reason}",
                extra={"step": base.step},
            )
        return self._restorable(base)

    def _condemn(self, bad: Restorable, reason: str) -> Restorable | None:
        """Condemn `bad`, and return the next checkpoint to load. Another writer's step has no entry to condemn."""
        if isinstance(bad, CommitRecord):
            body = QuarantineRequest(commit=bad.slot, reason=reason)
            claimed = decode(ClaimedRoot, self._request(Kind.QUARANTINE, encode(body)))
            return self._restorable(claimed.base or claimed.legacy)
        store = self._restorer.store
        older = [each for each in find_steps(store) if each.step <= bad.step and each.folder != bad.folder]
        look = partial(find_fault, store, reopen=self._restorer.reopen)
        legacy = choose_newest(store, older, look, reason=f"{name_record(bad)}: {reason}")
        return self._restorable(self._companion.claim_root(origin=Origin(legacy)).legacy)

    def _note_restored(self, commit: Restorable) -> Restorable:
        """Write into the log that all ranks have read the commit whole, unless part of it came from local disks."""
        # Copies on local disks prove nothing about the root.
        if isinstance(commit, CommitRecord) and not self._restorer.used_cache and self._is_readable(commit):
            self._request(Kind.VERIFIED, encode(VerifiedNotice(commit=commit.slot)))
        return commit

    def _request(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the companion for an entry of the log."""
        return self._companion.ensure_process().send_request(kind, body, timeout_s=CLAIM_S)

    def _is_readable(self, commit: CommitRecord) -> bool:
        """Return whether stock readers can load the commit too, and log it if they can't. All else of it was read."""
        try:
            check_metadata(self._restorer.store, commit)
        except TornCheckpointError as error:
            _log.error(
                "%s is fully restored, but stock torch can't load it: %s. It isn't marked as verified, so the one "
                "before it is kept until another save",
                name_record(commit),
                error,
                extra={"step": commit.step},
            )
            return False
        return True

    def _restorable(self, base: CommitRecord | ForeignBase | None) -> Restorable | None:
        """Convert the claim's base into a record that can be loaded, in rank 0, which has claimed."""
        if not isinstance(base, ForeignBase):
            return base
        claimed = self._companion.claimed_root
        assert claimed is not None
        return ForeignRecord(slot=claimed.claim.slot, step=base.step, folder=base.folder)


def restore_step(
    restorer: Restorer, companion: Companion, step: int, state: Mapping[str, object], *, rules: LoadRules
) -> Restorable:
    """Restore the newest commit of `step` on HEAD's line into `state`. Nothing is appended to the log.

    Raises:
        PartlyRestoredError: It failed after it had changed the state.
        RestoreError: There is no such commit; or it was deleted meanwhile.
        TornCheckpointError: Bytes of it are bad.
        BadNodeError: One node reads bad bytes where another one reads good ones.
    """
    record = restorer.votes.choose_in_rank_0(partial(find_settled_step, restorer.store, companion, step))
    assert record is not None
    restorer.restore(record, state, rules=rules)
    return record
