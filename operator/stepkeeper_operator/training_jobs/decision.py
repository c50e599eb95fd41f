"""Define the decision about one job, as values. `apply` executes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from stepkeeper_operator.api.v1alpha1.conditions import ConditionType, ConditionUpdate
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob_status import TrainingJobStatus
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.kinds.decision import KindDecision

__all__ = [
    "RELYING_ON_STATUS",
    "Action",
    "ApplyConfigMap",
    "CreateJobSet",
    "Decision",
    "DeleteJobSet",
    "DeleteTrainingJob",
    "EndHungPods",
    "GiveUpPod",
    "JobEnd",
    "SaveStacks",
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
    """Delete the JobSet in the foreground: it stays until its last pod is gone."""

    jobset: JobSet


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpPod:
    """Set phase Failed and DisruptionTarget in one write, then delete the pod without waiting for its kubelet."""

    pod: Pod
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStacks:
    """Write the ConfigMap with the stacks of a hang."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHungPods:
    """Mark all pods as hung, then delete them. Hung trainers can't save, so they get hardly any time."""

    pods: tuple[Pod, ...]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTrainingJob:
    """Delete the job itself: its time to live after its end has expired."""


Action: TypeAlias = (
    ApplyConfigMap
    | CreateJobSet
    | SetSuspend
    | DeleteJobSet
    | GiveUpPod
    | SaveStacks
    | EndHungPods
    | DeleteTrainingJob
)

RELYING_ON_STATUS: Final = (CreateJobSet, DeleteJobSet, SetSuspend, SaveStacks, EndHungPods)
"""Actions that start or end attempts. The status that numbers and explains the attempts is written first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """The end of the job, complete or failed."""

    complete: bool
    reason: Reason
    message: str

    def to_condition_updates(self) -> tuple[ConditionUpdate, ...]:
        """Return condition Finished for this end, and Complete or Failed."""
        kind = ConditionType.COMPLETE if self.complete else ConditionType.FAILED
        how = Reason.COMPLETE if self.complete else Reason.FAILED
        return (
            ConditionUpdate(type=ConditionType.FINISHED, status=True, reason=how, message=self.message),
            ConditionUpdate(type=kind, status=True, reason=self.reason, message=self.message),
        )


class Decision(KindDecision[TrainingJobStatus, Action]):
    """The result of a reconcile of one job."""

    __slots__ = ()
