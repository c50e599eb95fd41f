"""Restore one step by its number."""

from collections.abc import Mapping
from functools import partial

from stepkeeper.companion.supervisor import Companion
from stepkeeper.log.foreign_steps import Restorable
from stepkeeper.restore.listing import find_settled_step
from stepkeeper.restore.restorer import WHOLE, Restorer
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["restore_step"]


def restore_step(
    restorer: Restorer,
    companion: Companion,
    step: int,
    state: Mapping[str, object],
    *,
    rules: LoadRules = WHOLE,
) -> Restorable:
    """Restore the newest commit of `step` on HEAD's line into `state`. Nothing is appended to the log.

    Returns:
        What was restored: the commit, or another writer's step.

    Raises:
        RestoreError: There is no such commit; or it was deleted meanwhile, and parts of it are in `state`.
        TornCheckpointError: Bytes of it are bad.
        BadNodeError: One node reads bad bytes where another one reads good ones.

    """
    record = restorer.votes.choose_in_rank_0(partial(find_settled_step, restorer.store, companion, step))
    assert record is not None
    restorer.restore(record, state, rules=rules)
    return record
