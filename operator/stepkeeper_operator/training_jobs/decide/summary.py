"""Summarize a job for the columns of `kubectl get`: why it is in its phase, and its last end."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import (
    Condition,
    ConditionStatus,
    ConditionType,
    Phase,
    find_condition,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, RestartsStatus

__all__ = ["find_why", "show_last_end"]

_BY_PHASE: Final = {
    Phase.COMPLETE: ConditionType.COMPLETE,
    Phase.FAILED: ConditionType.FAILED,
    Phase.SUSPENDED: ConditionType.SUSPENDED,
    Phase.SUSPENDING: ConditionType.SUSPENDED,
    Phase.QUEUED: ConditionType.QUOTA_RESERVED,
}
_REQUIRED: Final = (
    ConditionType.RUNNING,
    ConditionType.PROGRESSING,
    ConditionType.REPORTING,
    ConditionType.GRACE_SUFFICIENT,
)
"""Conditions that are False if something is wrong with a job that has neither ended nor stopped, worst first."""


def find_why(
    phase: Phase | None, conditions: tuple[Condition, ...], attempts: tuple[Attempt, ...]
) -> str | None:
    """Find the reason of the phase, or of what is wrong while the job runs, in one word; None if nothing is."""
    kind = None if phase is None else _BY_PHASE.get(phase)
    if kind in {ConditionType.COMPLETE, ConditionType.FAILED}:
        return _find_reason(conditions, kind)
    if (refusal := _find_reason(conditions, ConditionType.ACCEPTED, ConditionStatus.FALSE)) is not None:
        return refusal
    if kind is not None:
        return _find_reason(conditions, kind)
    if _find_reason(conditions, ConditionType.POD_STUCK, ConditionStatus.TRUE) is not None:
        return ConditionType.POD_STUCK
    found = [_find_reason(conditions, required, ConditionStatus.FALSE) for required in _REQUIRED]
    reason = next(filter(None, found), None)
    ended = attempts[-1].cause if attempts else None
    return ended if reason == Reason.ENDED and ended is not None else reason


def show_last_end(restarts: RestartsStatus, attempts: tuple[Attempt, ...]) -> RestartsStatus:
    """Add the cause and the node of the newest end that has a cause."""
    last = next((attempt for attempt in reversed(attempts) if attempt.cause is not None), None)
    if last is None:
        return restarts
    return restarts.model_copy(update={"last_cause": last.cause, "last_node": last.node})


def _find_reason(
    conditions: tuple[Condition, ...], kind: ConditionType, status: ConditionStatus | None = None
) -> str | None:
    """Return the reason of a condition; None if there is none with that status."""
    condition = find_condition(conditions, kind)
    return condition.reason if condition is not None and status in {None, condition.status} else None
