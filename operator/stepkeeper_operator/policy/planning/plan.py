"""Define the part of a decision that is about the JobSet, and stop one."""

from dataclasses import dataclass

from stepkeeper_operator.api.v1alpha1.trainingjob_status import JobSetRef
from stepkeeper_operator.decision import Action, DeleteJobSet, JobEnd, SetSuspend
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.policy.history import JobHistory

__all__ = ["Plan", "set_suspend", "stop_jobset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The part of a decision that is about the JobSet."""

    history: JobHistory
    job_set: JobSetRef | None
    """Value for status.resources."""

    actions: tuple[Action, ...] = ()
    end: JobEnd | None = None
    waiting: str | None = None
    """The reason why a job without a running attempt waits, for people."""

    look_again_s: float | None = None


def stop_jobset(jobset: JobSet | None, *, queued: bool) -> tuple[Action, ...]:
    """Stop all pods after the job's end. The pods of a JobSet that ended by itself are kept for their logs.

    One that Kueue manages is not suspended first: Kueue would resume it.
    """
    if jobset is None or jobset.is_finished or jobset.deleting:
        return ()
    return (DeleteJobSet(jobset=jobset),) if jobset.suspended or queued else set_suspend(jobset, suspend=True)


def set_suspend(jobset: JobSet, *, suspend: bool) -> tuple[Action, ...]:
    """Suspend or resume the JobSet, if it is not so already."""
    return () if jobset.suspend == suspend else (SetSuspend(jobset=jobset, suspend=suspend),)
