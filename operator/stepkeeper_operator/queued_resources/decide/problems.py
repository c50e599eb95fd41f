"""Find the problems of a QueuedResource, and what to do about them. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cloud_tpu.cloud import to_camel_case
from stepkeeper_operator.queued_resources.cloud_view import CloudView, View
from stepkeeper_operator.queued_resources.decide.answers import PERMANENT, describe_error, error_kind
from stepkeeper_operator.queued_resources.decide.mirror import is_lost
from stepkeeper_operator.queued_resources.decision import Problem
from stepkeeper_operator.queued_resources.observed import Verb

__all__ = ["degraded", "find_obstacles", "find_problems", "name_some"]

_MAX_NAMED: Final = 3
_SILENT_S: Final = 300
"""Seconds without a listing after which it is a problem. Retries handle shorter outages."""

_REMOVING: Final = {Verb.LIST, Verb.DELETE}  # the requests that a removal needs


def find_problems(resource: QueuedResource, view: View) -> tuple[Problem, ...]:
    """Find the problems in the cloud's listing and in the spec, or that there is no listing."""
    texts = {
        Reason.AUTOCHECKPOINT_MISMATCH: _describe_autocheckpoint(resource, view.cloud),
        Reason.SLICE_UNHEALTHY: _describe_unhealthy_nodes(view.cloud),
        Reason.SLICE_NOT_READY: _describe_unready_nodes(resource, view.cloud),
        Reason.CLOUD_UNREACHABLE: _describe_outage(view),
        Reason.UNKNOWN_FIELDS: resource.spec.describe_unknown_fields(),
    }
    return tuple(Problem(reason=reason, message=text) for reason, text in texts.items() if text)


def find_obstacles(status: QueuedResourceStatus, view: View) -> tuple[Problem, ...]:
    """Find what blocks the removal of machines, and of their Node objects."""
    texts = {
        Reason.DELETION_BLOCKED: _describe_blocked_deletion(status, view),
        Reason.NODE_DELETION_REFUSED: _describe_refused_nodes(view),
    }
    return tuple(Problem(reason=reason, message=text) for reason, text in texts.items() if text)


def degraded(problems: tuple[Problem, ...]) -> ConditionUpdate:
    """Make condition Degraded of all problems. The first one gives the reason."""
    kind = QueuedResourceConditionType.DEGRADED
    if not problems:
        return ConditionUpdate(type=kind, status=False, reason=Reason.AS_EXPECTED)
    text = "; ".join(problem.message for problem in problems)
    return ConditionUpdate(type=kind, status=True, reason=problems[0].reason, message=text)


def name_some(names: list[str]) -> str:
    """List the first few names, and count the others."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _describe_blocked_deletion(status: QueuedResourceStatus, view: View) -> str:
    error, meta = status.error, view.meta
    if error is None or error.verb not in _REMOVING or error_kind(status) not in PERMANENT:
        return ""
    text = (
        f"{status.cloud_name or 'its cloud resource'} can't be deleted, and costs money while it exists: "
        f"{describe_error(status)}. Restore the operator's credentials and permissions; it then continues automatically"
    )
    if meta.deletion_timestamp is None:
        return text
    patch = f"kubectl -n {meta.namespace} patch qr {meta.name} --type merge -p"
    retain = '{"spec":{"deletionPolicy":"Retain"}}'
    return f"{text}. To delete only this object and keep the machines: {patch} '{retain}'"


def _describe_refused_nodes(view: View) -> str:
    refusals = view.observed.refusals
    refused = [member for member in view.observed.members if member.uid in refusals]
    if not refused:
        return ""
    names, first = name_some([member.name for member in refused]), refused[0]
    return (
        f"the API server refuses to delete Node {names}: {refusals[first.uid]}. The machines are gone, and the removal "
        "waits for their Node objects. Allow the operator's account to delete nodes, or fix the webhook that refuses "
        f"it; the removal then continues automatically. Or delete them: kubectl delete node {first.name}"
    )


def _describe_autocheckpoint(resource: QueuedResource, cloud: CloudView) -> str:
    wanted = resource.spec.autocheckpoint
    wrong = [node.id for node in cloud.nodes if node.autocheckpoint_enabled not in {None, wanted}]
    if not wrong:
        return ""
    return (
        f"autocheckpoint is {'off' if wanted else 'on'} on {name_some(wrong)}, but the spec has "
        f"{'on' if wanted else 'off'}. The cloud sets it at the creation only: delete this object and create it again. "
        f"If that changes nothing, set slices.autocheckpointEnabled: {str(not wanted).lower()} then"
    )


def _describe_unhealthy_nodes(cloud: CloudView) -> str:
    unhealthy = [node for node in cloud.nodes if not node.is_healthy]
    if not unhealthy:
        return ""
    first = unhealthy[0]
    why = first.health_description or "; ".join(first.symptoms) or "the cloud gives no reason"
    return f"{name_some([node.id for node in unhealthy])}: {to_camel_case(first.health)}: {why}"


def _describe_unready_nodes(resource: QueuedResource, cloud: CloudView) -> str:
    """Describe nodes of an active resource that can't run pods and aren't lost: stopped, repairing, unknown."""
    if cloud.resource is None or cloud.resource.phase is not QueuedResourceState.ACTIVE:
        return ""
    tier = resource.spec.tier
    found = (n for n in cloud.nodes if not (n.is_ready or n.is_changing or is_lost(n, tier)))
    unready = [f"{node.id} is {to_camel_case(node.state)}" for node in found]
    if not unready:
        return ""
    stopped = next((node for node in cloud.nodes if node.is_stopped), None)
    start = "" if stopped is None else f". Start it: gcloud compute tpus tpu-vm start {stopped.id}"
    return f"{name_some(unready)}: jobs wait until it is Ready again{start}"


def _describe_outage(view: View) -> str:
    observed = view.observed
    if observed.listing is not None or observed.error is None or view.now - observed.listed_at < _SILENT_S:
        return ""
    return (
        "the Cloud TPU API doesn't answer: this status may be out of date, and nothing is requested or removed. "
        f"Running nodes and jobs are not affected. {observed.error}"
    )
