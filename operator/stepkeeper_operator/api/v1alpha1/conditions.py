"""Define the conditions of a CheckpointedTrainingJob, and the phase that sums them up in one word."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from stepkeeper_operator.api.base import Count, StatusPart, Timestamp

__all__ = ["MAX_CONDITIONS", "Condition", "ConditionStatus", "ConditionType", "Phase"]

MAX_CONDITIONS = 16
"""Conditions that a status can hold, with those of other controllers."""


class Phase(StrEnum):
    """One word that sums up the conditions, for the printed column. The conditions say why."""

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
    """Kueue has reserved the quota that the job needs. Only jobs in a queue of Kueue have this condition."""

    RUNNING = "Running"
    """All pods of the current attempt run."""

    REPORTING = "Reporting"
    """The job's reports arrive. A False one names the likely reasons; it alone never restarts the job."""

    PROGRESSING = "Progressing"
    """The training makes steps. A False one says since when it makes none; it alone never restarts the job."""

    GRACE_SUFFICIENT = "GraceSufficient"
    """A save fits into the time that pods have at their end. Unknown until a commit tells how long one takes."""

    POD_STUCK = "PodStuck"
    """A pod that was told to end is still there long after its time. Only jobs that had one have this condition."""

    SUSPENDED = "Suspended"
    """Nothing of the job runs, because the user asked for it or because a limit was reached."""

    COMPLETE = "Complete"
    """Every pod exited 0."""

    FAILED = "Failed"
    """The job ended and is not started again."""


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
    """One word that says why."""

    message: Annotated[str, Field(max_length=2048)] = ""
    """The reason in full, and what to do about it."""

    last_transition_time: Timestamp
    """Time of the last change of status."""

    observed_generation: Count | None = None
    """Generation of the spec that the condition was found for."""
