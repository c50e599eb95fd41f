"""What is to be done for one job. Values only: `apply` does it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from stepkeeper_operator.api.v1alpha1.trainingjob_status import TrainingJobStatus
from stepkeeper_operator.facts import JobSet, Pod

__all__ = [
    "Action",
    "ApplyConfigMap",
    "CreateJobSet",
    "Decision",
    "DeleteJobSet",
    "DeletePod",
    "DeleteTrainingJob",
    "GiveUpPod",
    "Note",
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
class Note:
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
    notes: tuple[Note, ...] = ()
    """Told once the status is written."""

    requeue_after_s: float | None = None
