"""Accept a job, or find the problem that keeps it from running. Each message explains what to change."""

from typing import Final

from stepkeeper.contract import CONTAINER_NAME, Identity
from stepkeeper_operator.api.reading import describe_problems
from stepkeeper_operator.api.v1alpha1.conditions import ConditionType, ConditionUpdate
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.training_jobs.build.objects import config_map_name
from stepkeeper_operator.training_jobs.observed import Observed

__all__ = ["NAME_TAKEN", "check_acceptance"]

NAME_TAKEN: Final = frozenset({Reason.JOB_SET_NAME_TAKEN, Reason.CONFIG_MAP_NAME_TAKEN, Reason.ROOT_IN_USE})
"""The reasons that can end without an edit of the job, for example by the deletion of an object."""

_RESERVED_PREFIXES: Final = ("batch.kubernetes.io/", "jobset.sigs.k8s.io/")
_RESERVED_LABELS: Final = frozenset({"controller-uid", "job-name"})
"""Labels that the Job controller sets on every pod. It silently creates no pods if the template sets them."""


def check_acceptance(job: CheckpointedTrainingJob, observed: Observed) -> ConditionUpdate:
    """Derive condition Accepted. The API server refuses most problems; this finds those that it cannot check.

    An unknown field blocks nothing: after a rollback, an operator finds fields of newer CRDs in every job.
    """
    # The API server accepted these because its CRD is older or newer than this operator.
    unreadable = (Reason.UNREADABLE_SPEC, describe_problems(observed.unreadable))
    problem = (
        (unreadable if observed.unreadable else None)
        or _find_template_problem(job)
        or _find_name_conflict(job, observed)
        or _find_root_conflict(job, observed)
    )
    if problem is not None:
        reason, message = problem
        return ConditionUpdate(type=ConditionType.ACCEPTED, status=False, reason=reason, message=message)
    unknown = job.spec.describe_unknown_fields()
    reason = Reason.UNKNOWN_FIELDS if unknown else Reason.SPEC_ACCEPTED
    return ConditionUpdate(type=ConditionType.ACCEPTED, status=True, reason=reason, message=unknown)


def _find_template_problem(job: CheckpointedTrainingJob) -> tuple[Reason, str] | None:
    for label in (job.spec.template.get("metadata") or {}).get("labels") or {}:
        if label.startswith(_RESERVED_PREFIXES) or label in _RESERVED_LABELS:
            return (
                Reason.RESERVED_LABEL,
                f"label {label} is set by JobSet and Job: remove it from spec.template",
            )
    containers = (job.spec.template.get("spec") or {}).get("containers") or []
    trainers = [container for container in containers if container.get("name") == CONTAINER_NAME]
    if len(trainers) != 1:
        return (
            Reason.NO_TRAINER,
            f"spec.template needs exactly one container named {CONTAINER_NAME!r}, which runs the training",
        )
    reserved = set(Identity.variables())
    for variable in trainers[0].get("env") or ():
        if variable.get("name") in reserved:
            return (
                Reason.RESERVED_VARIABLE,
                f"{variable['name']} is set by the operator: remove it from spec.template",
            )
    return None


def _find_name_conflict(job: CheckpointedTrainingJob, observed: Observed) -> tuple[Reason, str] | None:
    name, uid = job.metadata.name, job.metadata.uid
    if observed.jobset is not None and observed.jobset.owner_uid != uid:
        text = f"JobSet {name} exists and does not belong to this job: delete it, or rename the job"
        return Reason.JOB_SET_NAME_TAKEN, text
    if observed.config_map is not None and observed.config_map.owner_uid != uid:
        text = f"ConfigMap {config_map_name(name)} exists and does not belong to this job: delete it, or rename the job"
        return Reason.CONFIG_MAP_NAME_TAKEN, text
    return None


def _find_root_conflict(job: CheckpointedTrainingJob, observed: Observed) -> tuple[Reason, str] | None:
    """Find an earlier job with a conflicting checkpoint root.

    A job that has begun is not refused: storage fences it, or has let it take over the root.
    """
    if job.status.attempts:
        return None
    own = (job.metadata.creation_timestamp or 0, job.metadata.uid)
    first = [
        rival
        for rival in observed.root_rivals
        if not rival.inactive and (rival.started or (rival.created_at, rival.uid) < own)
    ]
    if not first:
        return None
    rival = min(first, key=lambda each: (each.created_at, each.uid))
    text = (
        f"job {rival.namespace}/{rival.name} keeps its checkpoints in {rival.uri}: two jobs must not share a root, and "
        "no root may be inside another. Give this job another checkpoint.uri, or wait until that job has ended or is "
        "suspended or deleted"
    )
    return Reason.ROOT_IN_USE, text
