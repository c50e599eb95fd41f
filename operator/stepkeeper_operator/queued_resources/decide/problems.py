"""Find what is not as it should be with a QueuedResource, and what to do about it. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceStatus,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.queued_resources.decide.answers import LASTING, describe_error, error_kind
from stepkeeper_operator.queued_resources.decide.mirror import find_lost_states, to_word
from stepkeeper_operator.queued_resources.decision import Problem
from stepkeeper_operator.queued_resources.observed import Verb
from stepkeeper_operator.queued_resources.sight import Scene, Sight

__all__ = ["degraded", "find_obstacles", "find_problems", "name_some"]

_NAMED: Final = 3
_SILENT_S: Final = 300
"""Seconds without a listing that make a problem. Shorter silences are the retries' business."""

_ON_ITS_WAY: Final = {"READY", "CREATING", "DELETING", "STATE_UNSPECIFIED"}
"""States of nodes that are no problem of their own, besides those for which the resource is recreated."""

_REMOVING: Final = {Verb.LIST, Verb.DELETE}
"""Requests that a removal needs."""


def find_problems(resource: QueuedResource, scene: Scene) -> tuple[Problem, ...]:
    """Find the problems that the cloud's listing or the spec shows, or that there is no listing."""
    texts = {
        Reason.AUTOCHECKPOINT_MISMATCH: _describe_autocheckpoint(resource, scene.sight),
        Reason.SLICE_UNHEALTHY: _describe_unwell_nodes(scene.sight),
        Reason.SLICE_NOT_READY: _describe_unready_nodes(resource, scene.sight),
        Reason.CLOUD_UNREACHABLE: _describe_silence(scene),
        Reason.UNKNOWN_FIELDS: resource.spec.describe_unknown_fields(),
    }
    return tuple(Problem(reason=reason, message=text) for reason, text in texts.items() if text)


def find_obstacles(status: QueuedResourceStatus, scene: Scene) -> tuple[Problem, ...]:
    """Find what holds up the removal of machines, and of their Node objects."""
    texts = {
        Reason.DELETION_BLOCKED: _describe_blocked_deletion(status, scene),
        Reason.NODE_DELETION_REFUSED: _describe_refused_nodes(scene),
    }
    return tuple(Problem(reason=reason, message=text) for reason, text in texts.items() if text)


def degraded(problems: tuple[Problem, ...]) -> ConditionUpdate:
    """Sum up all problems; the first one gives the reason."""
    kind = QueuedResourceConditionType.DEGRADED
    if not problems:
        return ConditionUpdate(type=kind, status=False, reason=Reason.AS_EXPECTED)
    text = "; ".join(problem.message for problem in problems)
    return ConditionUpdate(type=kind, status=True, reason=problems[0].reason, message=text)


def name_some(names: list[str]) -> str:
    """Name the first few, and count the others."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _describe_blocked_deletion(status: QueuedResourceStatus, scene: Scene) -> str:
    error, meta = status.error, scene.meta
    if error is None or error.verb not in _REMOVING or error_kind(status) not in LASTING:
        return ""
    text = (
        f"{status.cloud_name or 'its cloud resource'} can't be deleted, and costs money while it exists: "
        f"{describe_error(status)}. Give the operator its credentials and permissions back and it continues by itself"
    )
    if meta.deletion_timestamp is None:
        return text
    patch = f"kubectl -n {meta.namespace} patch qr {meta.name} --type merge -p"
    return (
        f'{text}. To let go of it without deleting it: {patch} \'{{"spec":{{"deletionPolicy":"Retain"}}}}\''
    )


def _describe_refused_nodes(scene: Scene) -> str:
    refusals = scene.observed.refusals
    refused = [member for member in scene.observed.members if member.uid in refusals]
    if not refused:
        return ""
    names, first = name_some([member.name for member in refused]), refused[0]
    return (
        f"the API server doesn't delete Node {names}: {refusals[first.uid]}. The machines are gone, and "
        "everything else waits for their Node objects: let the operator's account delete nodes, or correct the webhook "
        f"that refuses it, and it continues by itself; or delete them: kubectl delete node {first.name}"
    )


def _describe_autocheckpoint(resource: QueuedResource, sight: Sight) -> str:
    wanted = resource.spec.autocheckpoint
    wrong = [node.id for node in sight.nodes if node.autocheckpoint_enabled not in {None, wanted}]
    if not wrong:
        return ""
    return (
        f"autocheckpoint is {'off' if wanted else 'on'} on {name_some(wrong)}, and the spec asks for "
        f"{'on' if wanted else 'off'}. The cloud takes it with the creation only: delete this object and make it "
        f"again; if that changes nothing, ask for slices.autocheckpointEnabled: {str(not wanted).lower()} there"
    )


def _describe_unwell_nodes(sight: Sight) -> str:
    unwell = [node for node in sight.nodes if node.health not in {"", "HEALTHY"}]
    if not unwell:
        return ""
    first = unwell[0]
    why = first.health_description or "; ".join(first.symptoms) or "the cloud gives no reason"
    return f"{name_some([node.id for node in unwell])}: {to_word(first.health)}: {why}"


def _describe_unready_nodes(resource: QueuedResource, sight: Sight) -> str:
    """Describe what takes no pods though the resource is active, and isn't lost: stopped, repaired, unknown."""
    if sight.resource is None or sight.resource.state != "ACTIVE":
        return ""
    settled = _ON_ITS_WAY | find_lost_states(resource.spec.tier)
    unready = [f"{node.id} is {to_word(node.state)}" for node in sight.nodes if node.state not in settled]
    if not unready:
        return ""
    stopped = next((node for node in sight.nodes if node.state == "STOPPED"), None)
    start = "" if stopped is None else f". Start it: gcloud compute tpus tpu-vm start {stopped.id}"
    return f"{name_some(unready)}: jobs wait until it is Ready again{start}"


def _describe_silence(scene: Scene) -> str:
    observed = scene.observed
    if observed.listing is not None or observed.error is None or scene.now - observed.listed_at < _SILENT_S:
        return ""
    return (
        "the Cloud TPU API can't be read: this status may be old, and nothing is requested or removed. "
        f"Nodes and jobs that run aren't affected. {observed.error}"
    )
