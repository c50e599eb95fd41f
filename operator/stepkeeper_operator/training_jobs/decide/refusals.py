"""Report writes that the API server refuses in condition Accepted, with the server's message."""

from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionType, ConditionUpdate, find_condition
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import TrainingJobStatus
from stepkeeper_operator.training_jobs.decide.acceptance import check_acceptance
from stepkeeper_operator.training_jobs.decision import (
    ApplyConfigMap,
    CreateJobSet,
    DeleteJobSet,
    DeleteTrainingJob,
    GiveUpPod,
    SetSuspend,
)
from stepkeeper_operator.training_jobs.memory import Rejection
from stepkeeper_operator.training_jobs.observed import REJECTION_RETRY_S, Observed

__all__ = ["add_refusals", "is_refused", "judge_after_end"]

_REASONS: Final = frozenset({Reason.REJECTED, Reason.FORBIDDEN, Reason.QUOTA_EXCEEDED})

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


def is_refused(status: TrainingJobStatus) -> bool:
    """Return True if the status reports that the API server refuses a write for the job."""
    return any(c.type == ConditionType.ACCEPTED and c.reason in _REASONS for c in status.conditions)


def add_refusals(
    accepted: ConditionUpdate, job: CheckpointedTrainingJob, observed: Observed
) -> ConditionUpdate:
    """Return condition Accepted, set to False if the API server refuses a write for an otherwise accepted job.

    A refusal that an earlier operator process reported is kept until this one has tried the writes itself.
    """
    if not accepted.status:
        return accepted
    known = find_condition(job.status.conditions, ConditionType.ACCEPTED)
    if not observed.has_acted and known is not None and is_refused(job.status):
        same = known.observed_generation == job.metadata.generation
        return (
            replace(accepted, status=False, reason=Reason(known.reason), message=known.message)
            if same
            else accepted
        )
    if not observed.rejections:
        return accepted
    found = [_describe(action, rejection) for action, rejection in observed.rejections.items()]
    return replace(
        accepted, status=False, reason=found[0][0], message="; ".join(message for _, message in found)
    )


def judge_after_end(job: CheckpointedTrainingJob, observed: Observed) -> tuple[ConditionUpdate, ...]:
    """Return condition Accepted of an ended job if it was False, or a write is refused now."""
    known = find_condition(job.status.conditions, ConditionType.ACCEPTED)
    was_unread = known is not None and known.reason == Reason.UNREADABLE_SPEC
    if not (observed.rejections or was_unread or is_refused(job.status)):
        return ()
    return (add_refusals(check_acceptance(job, observed), job, observed),)


def _describe(action: str, rejection: Rejection) -> tuple[Reason, str]:
    reason, why = Reason.REJECTED, ""
    if rejection.status == HTTPStatus.FORBIDDEN and "exceeded quota" in rejection.message:
        reason, why = Reason.QUOTA_EXCEEDED, ", since it would exceed a ResourceQuota of the namespace"
    elif rejection.status == HTTPStatus.FORBIDDEN:
        reason = Reason.FORBIDDEN
    elif action == CreateJobSet.__name__ and rejection.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        why = " from spec.template"
    again = f"every {REJECTION_RETRY_S:.0f} s" if action == CreateJobSet.__name__ else "with back-off"
    write = _WRITES.get(action, f"to do {action}")
    advice = f"{_ADVICE[reason]}; the write is retried {again}"
    return reason, f"the API server refuses {write}{why}. {advice}. Its message: {rejection.message}"
