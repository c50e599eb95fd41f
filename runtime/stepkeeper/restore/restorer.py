"""Load one checkpoint into the states of all ranks together. If its bytes are bad, find out why (see second_read)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from stepkeeper.coordination.mixed_state import MixedState
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import TornCheckpointError
from stepkeeper.log import CommitRecord
from stepkeeper.log.foreign_steps import Restorable
from stepkeeper.restore.fit import judge_mismatch
from stepkeeper.restore.listing import was_deleted
from stepkeeper.restore.loading import Loading
from stepkeeper.restore.peers.exchange import exchange_among
from stepkeeper.restore.planning import CommitContent, EarlyPlan, LoadPlan, read_head
from stepkeeper.restore.second_read import confirm_bad, this_host
from stepkeeper.restore.votes import Votes
from stepkeeper.storage import Store, open_store
from stepkeeper.tier import CachedStore
from stepkeeper_planners.loading.load_request import LoadTarget
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["WHOLE", "Restorer"]

WHOLE: Final = LoadRules()
"""The rules of a restore that loads all of a checkpoint."""

_EARLY_S: Final = 2.0
"""The time that the store has for HEAD's manifests before the claim, which waits for them."""


class Restorer:
    """Restore checkpoints into the state of one rank, together with the other ranks."""

    def __init__(
        self,
        store: Store,
        rank_group: RankGroup,
        *,
        reopen: Callable[[], Store] | None = None,
        cached_store: CachedStore | None = None,
        waits: Waits | None = None,
    ) -> None:
        """Restore from `store`, or `cached_store`, the same root with copies on a local disk.

        `reopen` opens the same root over a connection of its own.
        """
        self.mixed_state: Final = MixedState()
        self.waits: Final = waits or Waits()
        self.store: Final = store
        self.rank_group: Final = rank_group
        self.host: Final = this_host()
        self.reopen: Final = reopen or partial(open_store, store.uri)
        self.votes: Final = Votes(rank_group, self.waits)
        self._cached_store = cached_store
        self.used_cache = False
        """True, in rank 0, if any rank read part of the last load from its local disk."""

    def restore(
        self,
        record: Restorable,
        state: Mapping[str, object],
        *,
        rules: LoadRules = WHOLE,
        is_pinned: Callable[[], bool] = lambda: False,
    ) -> None:
        """Restore `record`, the same on all ranks, into `state`. Raises as `restore_step`.

        `is_pinned` returns whether a pin still holds the commit. It is called if objects are missing: with a
        pin that is damage, since retention can't have deleted them.
        """
        deleted = partial(was_deleted, self.store, record, is_pinned=is_pinned)
        with self.mixed_state.restoring():
            reason = self.load(record, LoadTarget(state), rules, was_deleted=deleted)
            if reason is not None:
                raise TornCheckpointError(reason)
            self.mixed_state.clear()

    def plan_early(self, target: LoadTarget, rules: LoadRules) -> EarlyPlan | None:
        """Plan to load the commit that is HEAD now; None if there is none, or if there are other ranks.

        Nothing is changed. Ranks plan together, after the first has sent the manifests. Raises TimeoutError if the
        store is slow, or as `load`.
        """
        if self.rank_group.world_size > 1:
            return None
        store = self.store if self._cached_store is None else self._cached_store
        found = self.waits.run(partial(read_head, store), _EARLY_S)
        if found is None:
            return None
        record, manifests = found
        content = CommitContent(store, record, manifests, self.waits)
        plan = LoadPlan.of(content, target, self.rank_group.ranks, rules)
        return EarlyPlan(record=record, plan=plan)

    def load(
        self,
        record: Restorable,
        target: LoadTarget,
        rules: LoadRules,
        *,
        early_plan: EarlyPlan | None = None,
        was_deleted: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Load `record` into the target's state. Return None if all ranks have, else why its bytes are bad.

        No rank changes anything in its state before all ranks have voted that the checkpoint fits theirs.
        Once it is loaded, the caller clears `mixed_state`. `early_plan` is used if it is of this checkpoint. Rank 0
        calls `was_deleted`, whether the log has deleted the commit, if the only fault is that objects are missing.
        Other failures are raised.
        """
        name, together = self.votes.new_name(), self.votes.act_together
        self._count_cached_bytes()  # those of an earlier load don't count
        with exchange_among(self.rank_group, name, self.waits) as exchange:
            # Local disks have copies of commits only.
            cached = self._cached_store if isinstance(record, CommitRecord) else None
            loading = Loading(
                self.store if cached is None else cached,
                record,
                target,
                self.rank_group.ranks,
                exchange=exchange,
                rules=rules,
                half_filled=self.mixed_state.names,
                early_plan=early_plan,
                waits=self.waits,
            )
            judge = partial(judge_mismatch, lambda: loading.stored_names)
            torn = together(f"{name}/fit", loading.compare_state, judge)
            if torn is None:
                loading.share_reading(f"{name}/values", of_values=True)
                torn = together(f"{name}/read", loading.read_values, judge)
            if torn is None:
                # Before other ranks send anything: it is put in place as it comes.
                self.mixed_state.note_change(f"step {record.step}", "reading its tensors", loading.names)
                loading.share_reading(f"{name}/tensors", of_values=False)
                torn = together(f"{name}/filled", loading.fill_tensors)
            if torn is None:
                self.mixed_state.note_change(f"step {record.step}", "loading its values")
                # Statefuls get nothing of a commit before all ranks have all of it.
                given = together(
                    f"{name}/given",
                    lambda: loading.scatter_values() | self._count_cached_bytes(),
                    self._note_cache_use,
                )
                if given is not None:
                    raise TornCheckpointError(given.reason)
                return None
            # The ranks are still connected here, so that a loss meanwhile is detected at once.
            return confirm_bad(
                f"{name}/torn",
                self.rank_group,
                self.host,
                torn.own_error,
                self.reopen,
                was_deleted=was_deleted,
                waits=self.waits,
            )

    def _count_cached_bytes(self) -> dict[str, Any]:
        """Count the bytes that this rank has read from its local disk since the last call."""
        return {} if self._cached_store is None else {"cached_bytes": self._cached_store.take_read_bytes()}

    def _note_cache_use(self, reports: Sequence[dict[str, Any]]) -> None:
        self.used_cache = any(each.get("cached_bytes") for each in reports)
