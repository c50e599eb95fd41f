"""Tell people of writes that the API server refuses, in condition Accepted and in its own words."""

from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Final

from stepkeeper_operator.cache.memory import Rejection
from stepkeeper_operator.decision import (
    ApplyConfigMap,
    ConditionUpdate,
    CreateJobSet,
    DeleteJobSet,
    DeletePod,
    GiveUpPod,
    SetSuspend,
)
from stepkeeper_operator.observed import REJECTED_AGAIN_S, Observed

__all__ = ["add_refusals"]

_WRITES: Final[Mapping[str, str]] = {
    CreateJobSet.__name__: "to make the JobSet",
    ApplyConfigMap.__name__: "to write the ConfigMap of the job's settings",
    SetSuspend.__name__: "to suspend or resume the JobSet",
    DeleteJobSet.__name__: "to delete the JobSet",
    DeletePod.__name__: "to delete a pod",
    GiveUpPod.__name__: "to give up a pod of a lost node",
}


def add_refusals(accepted: ConditionUpdate, observed: Observed) -> ConditionUpdate:
    """Return condition Accepted, False where the API server refuses a write for a job that is accepted otherwise."""
    if not observed.rejections or not accepted.status:
        return accepted
    found = [_describe(action, rejection) for action, rejection in observed.rejections.items()]
    return replace(
        accepted, status=False, reason=found[0][0], message="; ".join(message for _, message in found)
    )


def _describe(action: str, rejection: Rejection) -> tuple[str, str]:
    reason, why = "Rejected", ""
    if rejection.status == HTTPStatus.FORBIDDEN and "exceeded quota" in rejection.message:
        reason, why = "QuotaExceeded", ", since it is more than a ResourceQuota of the namespace allows"
    elif rejection.status == HTTPStatus.FORBIDDEN:
        reason = "Forbidden"
    elif action == CreateJobSet.__name__ and rejection.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        why = " from spec.template"
    again = f"every {REJECTED_AGAIN_S:.0f} s" if action == CreateJobSet.__name__ else "again and again"
    write = _WRITES.get(action, f"to do {action}")
    text = f"the API server refuses {write}{why}; it is tried {again}: {rejection.message}"
    return reason, text
