"""Derive condition Accepted: find what keeps a job from running, and which writes for it the API server refuses.

Each message explains what to change.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Final, TypeVar

from stepkeeper.contract import CONTAINER_NAME, Identity
from stepkeeper_operator.api.accelerators import count_chips
from stepkeeper_operator.api.reading import describe_problems
from stepkeeper_operator.api.v1alpha1.conditions import ConditionType, ConditionUpdate, find_condition
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import TrainingJobStatus
from stepkeeper_operator.facts.queued_resource import Slices
from stepkeeper_operator.facts.rival import Rival
from stepkeeper_operator.labels import QUEUE_LABEL
from stepkeeper_operator.training_jobs.build.objects import KEPT_JOBSET, config_map_name
from stepkeeper_operator.training_jobs.decision import (
    ApplyConfigMap,
    CreateJobSet,
    DeleteJobSet,
    DeleteTrainingJob,
    GiveUpPod,
    SetSuspend,
)
from stepkeeper_operator.training_jobs.observed import REJECTION_RETRY_S, Observed, Rejection, View

__all__ = [
    "NAME_TAKEN",
    "add_refusals",
    "check_acceptance",
    "find_kept_jobset",
    "is_refused",
    "judge_after_end",
]

R = TypeVar("R", bound=Rival)

NAME_TAKEN: Final = frozenset(
    {
        Reason.JOB_SET_NAME_TAKEN,
        Reason.CONFIG_MAP_NAME_TAKEN,
        Reason.ROOT_IN_USE,
        Reason.QUEUED_RESOURCE_IN_USE,
    }
)
"""The reasons that can end without an edit of the job, for example by the deletion of an object."""

_RESERVED_PREFIXES: Final = ("batch.kubernetes.io/", "jobset.sigs.k8s.io/")
_RESERVED_LABELS: Final = frozenset({"controller-uid", "job-name"})
"""Labels that the Job controller sets on every pod. It silently creates no pods if the template sets them."""

_WRITES: Final[Mapping[str, str]] = {
    CreateJobSet.__name__: "to create the JobSet",
    ApplyConfigMap.__name__: "to write the ConfigMap of the job's settings",
    SetSuspend.__name__: "to suspend or resume the JobSet",
    DeleteJobSet.__name__: "to delete the JobSet",
    GiveUpPod.__name__: "to give up a pod of a lost node",
    DeleteTrainingJob.__name__: "to delete the job, whose time to live has expired",
}

_ADVICE: Final[Mapping[Reason, str]] = {
    Reason.QUOTA_EXCEEDED: "Free some of the quota, or increase it",
    Reason.FORBIDDEN: "Grant that to the operator's ServiceAccount, or change the admission webhook that refuses it",
    Reason.REJECTED: "Fix spec.template, or the webhook that the message names",
}
"""What to do about a refused write, by the reasons that condition Accepted then has."""


def check_acceptance(job: CheckpointedTrainingJob, observed: Observed) -> ConditionUpdate:
    """Derive condition Accepted. The API server refuses most problems; this finds those that it cannot check.

    An unknown field blocks nothing: after a rollback, an operator finds fields of newer CRDs in every job.
    """
    problem = _find_conflict(job, observed)
    if problem is None and observed.unreadable:
        # The API server accepted these parts because its CRD is older or newer than this operator.
        until = "the job restarts with the settings that were accepted last"
        if find_kept_jobset(observed) is None:
            until = "nothing new starts: no settings of this job were accepted before"
        problem = Reason.UNREADABLE_SPEC, f"{describe_problems(observed.unreadable)}. Until then {until}"
    problem = problem or _find_template_problem(job) or _find_misfit(job, observed)
    if problem is not None:
        reason, message = problem
        return ConditionUpdate(type=ConditionType.ACCEPTED, status=False, reason=reason, message=message)
    unknown = job.spec.describe_unknown_fields()
    reason = Reason.UNKNOWN_FIELDS if unknown else Reason.SPEC_ACCEPTED
    return ConditionUpdate(type=ConditionType.ACCEPTED, status=True, reason=reason, message=unknown)


def find_kept_jobset(observed: Observed) -> str | None:
    """Find the JobSet of the last accepted spec. Older operators kept none."""
    return None if observed.config_map is None else observed.config_map.data.get(KEPT_JOBSET)


def _find_template_problem(job: CheckpointedTrainingJob) -> tuple[Reason, str] | None:
    for label in (job.spec.template.get("metadata") or {}).get("labels") or {}:
        if label.startswith(_RESERVED_PREFIXES) or label in _RESERVED_LABELS:
            text = f"label {label} is set by JobSet and Job: remove it from spec.template"
            return Reason.RESERVED_LABEL, text
    containers = (job.spec.template.get("spec") or {}).get("containers") or []
    trainers = [container for container in containers if container.get("name") == CONTAINER_NAME]
    if len(trainers) != 1:
        text = f"spec.template needs exactly one container named {CONTAINER_NAME!r}, which runs the training"
        return Reason.NO_TRAINER, text
    reserved = set(Identity.variables())
    for variable in trainers[0].get("env") or ():
        if variable.get("name") in reserved:
            text = f"{variable['name']} is set by the operator: remove it from spec.template"
            return Reason.RESERVED_VARIABLE, text
    return None


def _find_conflict(job: CheckpointedTrainingJob, observed: Observed) -> tuple[Reason, str] | None:
    """Find another owner of a name or of the checkpoint root that the job needs."""
    name, uid = job.metadata.name, job.metadata.uid
    if observed.jobset is not None and observed.jobset.owner_uid != uid:
        text = f"JobSet {name} exists and does not belong to this job: delete it, or rename the job"
        return Reason.JOB_SET_NAME_TAKEN, text
    if observed.config_map is not None and observed.config_map.owner_uid != uid:
        text = f"ConfigMap {config_map_name(name)} exists and does not belong to this job: delete it, or rename the job"
        return Reason.CONFIG_MAP_NAME_TAKEN, text
    return _find_root_conflict(job, observed)


def _find_root_conflict(job: CheckpointedTrainingJob, observed: Observed) -> tuple[Reason, str] | None:
    """Find a job with a conflicting checkpoint root that takes precedence: it has started, or was created earlier."""
    if job.status.attempts:
        return None  # once this job has started, storage fences it where needed
    preceding = _list_preceding(job, observed.root_rivals)
    if not preceding:
        return None
    rival = preceding[0]
    text = (
        f"job {rival.namespace}/{rival.name} keeps its checkpoints in {rival.uri}: two jobs must not share a root, and "
        "no root may be inside another. Give this job another checkpoint.uri, or wait until that job has ended or is "
        "suspended or deleted"
    )
    return Reason.ROOT_IN_USE, text


def _find_misfit(job: CheckpointedTrainingJob, observed: Observed) -> tuple[Reason, str] | None:
    """Find why the slices of the job's QueuedResource can't run it, or that earlier jobs need them."""
    tpu, machines = job.spec.placement.tpu, observed.machines
    if tpu is None or machines is None or not machines.slices.accelerator:
        return None
    asked, slices = (
        Slices(accelerator=tpu.accelerator, topology=tpu.topology, count=tpu.slices),
        machines.slices,
    )
    has = f"QueuedResource {machines.name} has {slices}"
    if not slices.can_run(asked):
        text = (
            f"spec.placement.tpu asks for {asked}, but {has}: a job runs on whole slices, or on a part of a slice that "
            "is one host. Change accelerator, topology or slices, or name another QueuedResource"
        )
        return Reason.QUEUED_RESOURCE_MISMATCH, text
    if job.status.attempts or job.spec.suspend or QUEUE_LABEL in job.metadata.labels:
        return None  # it has its place already, needs none now, or Kueue decides
    users = [user for user in _list_preceding(job, observed.machines_users) if slices.can_run(user.slices)]
    n_chips = sum(slices.count_taken_chips(each) for each in (asked, *(user.slices for user in users)))
    if not users or n_chips <= slices.count * count_chips(slices.topology):
        return None
    text = (
        f"{has}, and job {', '.join(user.name for user in users)} takes precedence: this one starts when enough of it "
        "is free. Wait until that job has ended, suspend it, or name another QueuedResource"
    )
    return Reason.QUEUED_RESOURCE_IN_USE, text


def _list_preceding(job: CheckpointedTrainingJob, rivals: Iterable[R]) -> list[R]:
    """List the active jobs that take precedence over one that has not started: they have, or they are older."""
    age = (job.metadata.creation_timestamp or 0, job.metadata.uid)
    active = [rival for rival in rivals if not rival.inactive]
    preceding = (rival for rival in active if rival.started or (rival.created_at, rival.uid) < age)
    return sorted(preceding, key=lambda each: (each.created_at, each.uid))


def is_refused(status: TrainingJobStatus) -> bool:
    """Return True if the status reports that the API server refuses a write for the job."""
    return any(c.type == ConditionType.ACCEPTED and c.reason in _ADVICE for c in status.conditions)


def add_refusals(accepted: ConditionUpdate, view: View) -> ConditionUpdate:
    """Return condition Accepted, set to False if the API server refuses a write for an otherwise accepted job.

    A refusal that an earlier operator process reported is kept until this one has tried the writes itself.
    """
    if not accepted.status:
        return accepted
    before = find_condition(view.job.status.conditions, ConditionType.ACCEPTED)
    if not view.observed.has_acted and before is not None and is_refused(view.job.status):
        if before.observed_generation != view.job.metadata.generation:
            return accepted  # the edit of the spec may have fixed it
        return replace(accepted, status=False, reason=Reason(before.reason), message=before.message)
    if not view.observed.rejections:
        return accepted
    reasons, messages = zip(*(_describe(*each) for each in view.observed.rejections.items()), strict=True)
    return replace(accepted, status=False, reason=reasons[0], message="; ".join(messages))


def judge_after_end(view: View) -> tuple[ConditionUpdate, ...]:
    """Return condition Accepted of an ended job if it was False and may change, or a write is refused now."""
    before = find_condition(view.job.status.conditions, ConditionType.ACCEPTED)
    was_unread = before is not None and before.reason == Reason.UNREADABLE_SPEC
    if view.observed.rejections or view.observed.unreadable or was_unread or is_refused(view.job.status):
        return (add_refusals(check_acceptance(view.job, view.observed), view),)
    return ()


def _describe(action: str, rejection: Rejection) -> tuple[Reason, str]:
    reason, why = Reason.REJECTED, ""
    if rejection.status == HTTPStatus.FORBIDDEN and "exceeded quota" in rejection.message:
        reason, why = Reason.QUOTA_EXCEEDED, ", since it would exceed a ResourceQuota of the namespace"
    elif rejection.status == HTTPStatus.FORBIDDEN:
        reason = Reason.FORBIDDEN
    elif action == CreateJobSet.__name__ and rejection.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        why = " from spec.template"
    again = f"every {REJECTION_RETRY_S:.0f} s" if action == CreateJobSet.__name__ else "with back-off"
    write = _WRITES[action]
    advice = f"{_ADVICE[reason]}; the write is retried {again}"
    return reason, f"the API server refuses {write}{why}. {advice}. Its message: {rejection.message}"
