"""Define the conditions of both kinds, their updates, and the phase that summarizes a job's conditions."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from stepkeeper_operator.api.base import Count, StatusPart, Timestamp
from stepkeeper_operator.api.v1alpha1.reasons import Reason

__all__ = [
    "MAX_CONDITIONS",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "ConditionUpdate",
    "Phase",
    "find_condition",
    "merge_conditions",
]

MAX_CONDITIONS: Final = 16
"""Conditions that a status can hold, including those of other controllers."""

_MESSAGE_LIMIT: Final = 2048


class Phase(StrEnum):
    """One word that summarizes the conditions, for the printed column. The conditions have the details."""

    PENDING = "Pending"
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ConditionType(StrEnum):
    ACCEPTED = "Accepted"
    """The operator can run the spec."""

    QUOTA_RESERVED = "QuotaReserved"
    """Kueue has reserved the quota that the job needs. Only jobs in a Kueue queue have this condition."""

    RUNNING = "Running"
    """All pods of the current attempt run."""

    REPORTING = "Reporting"
    """The job's reports arrive. If False, the message names the likely reasons. It never restarts the job."""

    PROGRESSING = "Progressing"
    """The training makes steps. If False, the message has the last step and its time. It never restarts the job."""

    GRACE_SUFFICIENT = "GraceSufficient"
    """A save fits into the pods' grace period. Unknown until the first commit shows how long a save takes."""

    POD_STUCK = "PodStuck"
    """A terminating pod still exists long after its grace period. Only jobs that had one have this condition."""

    SUSPENDED = "Suspended"
    """Nothing of the job runs, because the user asked for it or because a limit was reached."""

    FINISHED = "Finished"
    """The job has ended. The reason is Complete or Failed; False while it can still run."""

    COMPLETE = "Complete"
    """Every pod exited 0."""

    FAILED = "Failed"
    """The job ended and is not started again."""


END_CONDITIONS: Final = frozenset({ConditionType.FINISHED, ConditionType.COMPLETE, ConditionType.FAILED})
"""Any of them is True once the job is over."""


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusPart):
    type: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the condition, for example Accepted. Each kind has its own."""

    status: ConditionStatus
    """True, False or Unknown."""

    reason: Annotated[str, Field(min_length=1, max_length=128)]
    """The reason in one word. docs/operations/conditions.md lists all of them."""

    message: Annotated[str, Field(max_length=_MESSAGE_LIMIT)] = ""
    """The reason in full, and what to do about it."""

    last_transition_time: Timestamp
    """Time of the last change of status."""

    observed_generation: Count | None = None
    """Generation of the spec that the condition is about."""


_STATUS: Final = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """The new value of one condition."""

    type: StrEnum
    reason: Reason
    message: str = ""
    status: bool | None = field(kw_only=True)
    """None: status Unknown."""

    def apply_to(self, known: Condition | None, *, generation: int | None, now: float) -> Condition:
        """Return the updated condition. Its transition time changes only with the status."""
        status = _STATUS[self.status]
        since = known.last_transition_time if known is not None and known.status is status else int(now)
        return Condition(
            type=self.type,
            status=status,
            reason=self.reason.value,
            message=self.message[:_MESSAGE_LIMIT],
            last_transition_time=since,
            observed_generation=generation,
        )


def find_condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind), None)


def merge_conditions(
    before: tuple[Condition, ...],
    updates: Iterable[ConditionUpdate],
    kinds: type[StrEnum],
    *,
    generation: int,
    now: float,
) -> tuple[Condition, ...]:
    """Merge `updates` into the conditions of an object.

    Those of the operator come first, in the order of `kinds`; then those of other controllers, if there is room.
    """
    after = {condition.type: condition for condition in before}
    for update in updates:
        known = find_condition(before, update.type)
        after[update.type] = update.apply_to(known, generation=generation, now=now)
    order = [kind.value for kind in kinds]
    merged = sorted(after.values(), key=lambda c: order.index(c.type) if c.type in order else len(order))
    return tuple(merged[:MAX_CONDITIONS])
