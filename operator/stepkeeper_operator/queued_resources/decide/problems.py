"""Find what is not as it should be with a QueuedResource, and say what to do about it. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import ErrorKind
from stepkeeper_operator.queued_resources.decide.answers import describe_error, error_kind
from stepkeeper_operator.queued_resources.decide.ends import find_lost_states
from stepkeeper_operator.queued_resources.decide.mirror import to_word
from stepkeeper_operator.queued_resources.decision import Problem
from stepkeeper_operator.queued_resources.observed import Observed, Verb
from stepkeeper_operator.queued_resources.sight import Scene, Sight

__all__ = ["degraded", "find_blocked_deletion", "find_problems", "find_refusals", "name_some"]

_NAMED: Final = 3
_SILENT_S: Final = 300
"""Seconds without a listing that are told of. Shorter silences are the retries' business."""

_ON_ITS_WAY: Final = {"READY", "CREATING", "DELETING", "STATE_UNSPECIFIED"}
"""States of nodes that need no word of their own, besides those for which the resource is made anew."""

_BLOCKING: Final = {ErrorKind.TERMINAL, ErrorKind.NOT_FOUND, ErrorKind.CREDENTIALS}
_REMOVING: Final = {Verb.LIST, Verb.DELETE}
"""Requests that a removal needs."""


def find_problems(resource: QueuedResource, scene: Scene) -> tuple[Problem, ...]:
    """Find the problems that the cloud's listing or the spec shows, or that there is no listing."""
    return (
        *_find_autocheckpoint_problem(resource, scene.sight),
        *_find_unwell_nodes(scene.sight),
        *_find_unready_nodes(resource, scene.sight),
        *_find_silence(scene.observed, now=scene.now),
        *_find_unknown_fields(resource),
    )


def degraded(problems: tuple[Problem, ...]) -> ConditionUpdate:
    """Sum up all problems; the first one gives the reason."""
    if not problems:
        return ConditionUpdate(type=QueuedResourceConditionType.DEGRADED, status=False, reason="AsExpected")
    text = "; ".join(problem.message for problem in problems)
    return ConditionUpdate(
        type=QueuedResourceConditionType.DEGRADED, status=True, reason=problems[0].reason, message=text
    )


def name_some(names: list[str]) -> str:
    """Name the first few, and count the others."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def find_blocked_deletion(meta: ObjectMeta, status: QueuedResourceStatus) -> tuple[Problem, ...]:
    """Find why the cloud refuses to delete what is being removed, and what somebody has to do about it."""
    error = status.error
    if error is None or error.verb not in _REMOVING or error_kind(status) not in _BLOCKING:
        return ()
    text = (
        f"{status.cloud_name or 'its cloud resource'} can't be deleted, and costs money while it exists: "
        f"{describe_error(status)}. Give the operator its credentials and permissions back and it goes on by itself"
    )
    if meta.deletion_timestamp is not None:
        patch = f"kubectl -n {meta.namespace} patch qr {meta.name} --type merge -p"
        text += f'. To let go of it without deleting it: {patch} \'{{"spec":{{"deletionPolicy":"Retain"}}}}\''
    return (Problem(reason="DeletionBlocked", message=text),)


def find_refusals(observed: Observed) -> tuple[Problem, ...]:
    """Find the nodes that can't be deleted though their machines are removed."""
    refused = [(m.name, m.deletion_refusal) for m in observed.members if m.deletion_refusal is not None]
    if not refused:
        return ()
    names = name_some([name for name, _ in refused])
    first_name, refusal = refused[0]
    text = (
        f"node {names} of this cluster can't be deleted: {refusal.text}. The machines are gone, and "
        "everything else waits for their Node objects: let the operator's account delete nodes, or correct the webhook "
        f"that refuses it, and it goes on by itself; or delete them: kubectl delete node {first_name}"
    )
    return (Problem(reason="NodeDeletionRefused", message=text),)


def _find_autocheckpoint_problem(resource: QueuedResource, sight: Sight) -> tuple[Problem, ...]:
    wanted = resource.spec.autocheckpoint
    wrong = [
        node.id
        for node in sight.nodes
        if node.autocheckpoint_enabled is not None and node.autocheckpoint_enabled is not wanted
    ]
    if not wrong:
        return ()
    text = (
        f"autocheckpoint is {'off' if wanted else 'on'} on {name_some(wrong)}, and the spec asks for "
        f"{'on' if wanted else 'off'}. The cloud takes it with the creation only: delete this object and make it "
        f"again; if that changes nothing, ask for node.autocheckpointEnabled: {str(not wanted).lower()} there"
    )
    return (Problem(reason="AutocheckpointMismatch", message=text),)


def _find_unwell_nodes(sight: Sight) -> tuple[Problem, ...]:
    unwell = [node for node in sight.nodes if node.health not in {"", "HEALTHY"}]
    if not unwell:
        return ()
    first = unwell[0]
    why = first.health_description or "; ".join(first.symptoms) or "the cloud doesn't say why"
    text = f"{name_some([node.id for node in unwell])}: {to_word(first.health)}: {why}"
    return (Problem(reason="NodeUnhealthy", message=text),)


def _find_unready_nodes(resource: QueuedResource, sight: Sight) -> tuple[Problem, ...]:
    """Find what takes no pods though the resource is active, and isn't lost for ever: stopped, repaired, unknown."""
    if sight.resource is None or sight.resource.state != "ACTIVE":
        return ()
    settled = _ON_ITS_WAY | find_lost_states(resource.spec.tier)
    unready = [node for node in sight.nodes if node.state not in settled]
    if not unready:
        return ()
    named = name_some([f"{node.id} is {to_word(node.state)}" for node in unready])
    text = f"{named}: jobs wait until it is Ready again"
    return (Problem(reason="NodeNotReady", message=text),)


def _find_silence(observed: Observed, *, now: float) -> tuple[Problem, ...]:
    if observed.listing is not None or now - observed.listed_at < _SILENT_S or observed.error is None:
        return ()
    text = f"the cloud can't be looked at, and this status may be old: {observed.error}"
    return (Problem(reason="CloudUnreachable", message=text),)


def _find_unknown_fields(resource: QueuedResource) -> tuple[Problem, ...]:
    unknown = resource.spec.describe_unknown_fields()
    return (Problem(reason="UnknownFields", message=unknown),) if unknown else ()
