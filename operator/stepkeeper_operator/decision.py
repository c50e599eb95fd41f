"""What is to be done for one job. Values only: `apply` does it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from stepkeeper_operator.api.v1alpha1.trainingjob_status import ConditionType, TrainingJobStatus
from stepkeeper_operator.facts import JobSet, Pod

__all__ = [
    "Action",
    "ApplyConfigMap",
    "ConditionUpdate",
    "CreateJobSet",
    "Decision",
    "DeleteJobSet",
    "DeletePod",
    "DeleteTrainingJob",
    "GiveUpPod",
    "JobEnd",
    "JobEvent",
    "SetSuspend",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyConfigMap:
    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateJobSet:
    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSuspend:
    jobset: JobSet
    suspend: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJobSet:
    """In the foreground: it stays until its last pod is gone."""

    jobset: JobSet


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """With its grace period, as the garbage collector would."""

    pod: Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpPod:
    """Phase Failed and DisruptionTarget, in one write; then its object is deleted without its kubelet."""

    pod: Pod
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTrainingJob:
    """Its time to live after its end is over."""


Action: TypeAlias = (
    ApplyConfigMap | CreateJobSet | SetSuspend | DeleteJobSet | DeletePod | GiveUpPod | DeleteTrainingJob
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionUpdate:
    """A condition as it has to be now."""

    type: ConditionType
    status: bool | None
    """None: nobody can say, which is status Unknown."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """The end of the job, complete or failed."""

    complete: bool
    reason: str
    message: str

    def to_condition_update(self) -> ConditionUpdate:
        """Return the condition Complete or Failed that says this end."""
        kind = ConditionType.COMPLETE if self.complete else ConditionType.FAILED
        return ConditionUpdate(type=kind, status=True, reason=self.reason, message=self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """An event for people."""

    warning: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    status: TrainingJobStatus
    write_status: bool = False
    """The status goes first: what it reserves is used by the actions."""

    actions: tuple[Action, ...] = ()
    events: tuple[JobEvent, ...] = ()
    """Told once the status is written."""

    requeue_after_s: float | None = None
