"""Derive the conditions of a QueuedResource. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudMaintenance, CloudNode, ErrorKind
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.queued_resources.decide.answers import error_kind
from stepkeeper_operator.queued_resources.decide.joining import derive_joined
from stepkeeper_operator.queued_resources.decide.mirror import find_next_maintenance, to_word
from stepkeeper_operator.queued_resources.decide.problems import degraded, find_problems, name_some
from stepkeeper_operator.queued_resources.decision import Plan
from stepkeeper_operator.queued_resources.sight import Presence, Scene, Sight

__all__ = ["derive_conditions"]

_TYPES: Final = QueuedResourceConditionType

_STATE_TEXTS: Final = {
    QueuedResourceState.CREATING: "the cloud is creating the request",
    QueuedResourceState.ACCEPTED: "the request waits in the queue for machines",
    QueuedResourceState.WAITING: "the request waits in the queue for machines",
    QueuedResourceState.PROVISIONING: "the machines are being provided",
    QueuedResourceState.ACTIVE: "all machines are provided",
    QueuedResourceState.SUSPENDING: "the cloud takes the machines back",
    QueuedResourceState.SUSPENDED: "the machines are gone",
    QueuedResourceState.DELETING: "it is being deleted",
    QueuedResourceState.GONE: "it was removed and isn't made anew",
}
_REFUSALS: Final = {
    ErrorKind.TERMINAL: "Refused",
    ErrorKind.NOT_FOUND: "Refused",
    ErrorKind.ALREADY_EXISTS: "AlreadyExists",
    ErrorKind.CREDENTIALS: "NoCredentials",
}
_ADVICE: Final = {
    ErrorKind.TERMINAL: "Change the spec, or what the message names in the project; it is tried again every hour, and"
    " at once after a change of the spec",
    ErrorKind.NOT_FOUND: "Check spec.project and spec.zone; it is tried again every hour",
    ErrorKind.ALREADY_EXISTS: "Something of that name exists that can't be listed, or a node of that name: choose"
    " another metadata.name or node.idPrefix, or delete it. The name of a deletion just now is free again soon: it is"
    " tried again",
    ErrorKind.CREDENTIALS: "Give the operator credentials that are accepted: cloudTPU.credentialsSecret in the"
    " chart's values (examples/queued_resource/README.md)",
}
_ONGOING: Final = "ONGOING"
_QUOTA_IS_ENOUGH: Final = {
    QueuedResourceState.WAITING,
    QueuedResourceState.PROVISIONING,
    QueuedResourceState.ACTIVE,
    QueuedResourceState.SUSPENDING,
    QueuedResourceState.SUSPENDED,
}


def derive_conditions(
    resource: QueuedResource, plan: Plan, status: QueuedResourceStatus, scene: Scene
) -> tuple[tuple[ConditionUpdate, ...], float | None]:
    """Derive the conditions that can be told now; the others stay as they are.

    Returns:
        The conditions, and the seconds until a deadline of theirs; None if there is none.

    """
    sight = scene.sight
    joined, look_s = derive_joined(resource, status, scene)
    findings = [
        _derive_accepted(plan, sight, status),
        _derive_active(plan, sight, status),
        joined,
        degraded((*plan.problems, *find_problems(resource, scene))),
        _derive_maintenance(scene),
        _derive_quota(sight, status),
    ]
    return tuple(finding for finding in findings if finding is not None), look_s


def _derive_accepted(plan: Plan, sight: Sight, status: QueuedResourceStatus) -> ConditionUpdate | None:
    kind = _TYPES.ACCEPTED
    if plan.accepted is not None:
        return plan.accepted
    error = error_kind(status)
    if status.error is not None and error in _REFUSALS and status.error.verb != "Delete":
        text = f"{status.error.code}: {status.error.message}. {_ADVICE[error]}"
        return ConditionUpdate(type=kind, status=False, reason=_REFUSALS[error], message=text)
    if sight.is_ours and sight.resource is not None and sight.resource.state != "FAILED":
        return ConditionUpdate(
            type=kind, status=True, reason="Accepted", message=f"the cloud has {sight.resource.name}"
        )
    if any(condition.type == kind for condition in status.conditions) and not plan.actions:
        return None
    return ConditionUpdate(type=kind, status=None, reason="NotAnswered", message=plan.waiting)


def _derive_active(plan: Plan, sight: Sight, status: QueuedResourceStatus) -> ConditionUpdate | None:
    kind, state = _TYPES.ACTIVE, status.state or QueuedResourceState.PENDING
    removing = status.bookkeeping.removing
    if removing:
        return ConditionUpdate(type=kind, status=False, reason=removing, message=plan.waiting)
    if sight.presence is Presence.UNKNOWN and status.conditions:
        return None
    if state is QueuedResourceState.ACTIVE:
        return ConditionUpdate(type=kind, status=True, reason="Active", message=_STATE_TEXTS[state])
    text, found = plan.waiting or _STATE_TEXTS.get(state, ""), sight.resource if sight.is_ours else None
    if state is QueuedResourceState.UNKNOWN and found is not None:
        text = (
            f"the cloud says {found.state}, which this version of the operator doesn't know: jobs wait, and nothing is "
            "done to it until that changes or this object is deleted. Upgrade the operator if it lasts"
        )
    if found is not None and found.error_code:
        text = f"{found.error_code}: {found.error_message}"
    elif status.error is not None:
        text = f"{text}{'; ' if text else ''}{status.error.code}: {status.error.message}"
    return ConditionUpdate(type=kind, status=False, reason=state.value, message=text)


def _derive_maintenance(scene: Scene) -> ConditionUpdate | None:
    kind, sight, listing = _TYPES.MAINTENANCE_SCHEDULED, scene.sight, scene.observed.listing
    if listing is None:
        return None
    told = listing.version is ApiVersion.V2ALPHA1
    found = find_next_maintenance(sight.nodes, now=scene.now)
    if found is None and (told or not sight.nodes):
        return ConditionUpdate(type=kind, status=False, reason="NotAnnounced")
    if found is None:
        text = f"version v2 of the Cloud TPU API doesn't report maintenance; v2alpha1 is refused ({listing.refusal})"
        return ConditionUpdate(type=kind, status=None, reason="NotTold", message=text)
    return _describe_maintenance(sight.nodes, found, now=scene.now)


def _describe_maintenance(
    nodes: tuple[CloudNode, ...], found: tuple[CloudNode, CloudMaintenance], *, now: float
) -> ConditionUpdate:
    kind = _TYPES.MAINTENANCE_SCHEDULED
    current = tuple(n for n in nodes if n.maintenance is not None and not _is_over(n.maintenance, now=now))
    first, maintenance = find_next_maintenance(current, now=now) or found
    more = f", and {len(current) - 1} more" if len(current) > 1 else ""
    text = f"node {first.id}{more}: {_describe_window(maintenance, now=now)}"
    if not current:
        return ConditionUpdate(type=kind, status=False, reason="Over", message=text)
    ongoing = [n.id for n in current if n.maintenance is not None and n.maintenance.status == _ONGOING]
    if ongoing and first.id not in ongoing:
        text += f"; {name_some(ongoing)} has maintenance now"
    return ConditionUpdate(type=kind, status=True, reason="Ongoing" if ongoing else "Pending", message=text)


def _is_over(maintenance: CloudMaintenance, *, now: float) -> bool:
    """Return True once its window has ended, unless the cloud says that it continues. The cloud may list it longer."""
    end = maintenance.window_end
    return maintenance.status != _ONGOING and end is not None and end <= now


def _describe_window(maintenance: CloudMaintenance, *, now: float) -> str:
    start, end = maintenance.window_start, maintenance.window_end
    ongoing = maintenance.status == _ONGOING
    text = f"{to_word(maintenance.type)} maintenance is {to_word(maintenance.status)}, "
    began = [] if start is None else [f"began at {render_time(start)}"]
    if end is not None and end <= now:
        times = " and ".join([*began, f"ended at {render_time(end)}"])
        return f"{text}{'though ' if ongoing else ''}its window {times}"
    if start is not None and start <= now:
        ends = [] if end is None else [f"ends at {render_time(end)}"]
        return f"{text}its window {' and '.join([*began, *ends])}"
    text += "at an unknown time" if start is None else f"from {render_time(start)}"
    if end is not None:
        text += f" to {render_time(end)}"
    asked = start is not None and not ongoing
    return f"{text}. Jobs on it save before it begins" if asked else text


def _derive_quota(sight: Sight, status: QueuedResourceStatus) -> ConditionUpdate | None:
    kind, known = _TYPES.QUOTA_EXHAUSTED, {condition.type for condition in status.conditions}
    text, error = "", status.error
    if error is not None and error.verb != "Delete" and error_kind(status) is ErrorKind.QUOTA:
        text = error.message
    elif sight.resource is not None and sight.is_ours and sight.resource.error_code == "RESOURCE_EXHAUSTED":
        text = sight.resource.error_message
    if text:
        text = f"{text}. It is tried again, slowly: free quota in the project, or ask for more"
        return ConditionUpdate(type=kind, status=True, reason="QuotaExhausted", message=text)
    if status.state in _QUOTA_IS_ENOUGH or kind not in known:
        return ConditionUpdate(type=kind, status=False, reason="QuotaSuffices")
    return None
