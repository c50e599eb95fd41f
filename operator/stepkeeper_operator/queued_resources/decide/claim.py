"""Make this object's what somebody else has made: label its live nodes, and see whether somebody else does, too. Pure.

The API writes labels without a condition: of two operators that find the same machines unlabelled, the later one
overwrites the other. So all label the same node first, and its labels count once they have stood for longer than a
late one can take. By then, every other operator sees them before it writes, and the other nodes follow.
"""

import math
from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource, ErrorKind
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.queued_resources.decide.answers import book, error_kind
from stepkeeper_operator.queued_resources.decide.mirror import match_members
from stepkeeper_operator.queued_resources.decision import Action, Finding, LabelNodes, Plan, Relabel
from stepkeeper_operator.queued_resources.naming import make_labels
from stepkeeper_operator.queued_resources.observed import Verb
from stepkeeper_operator.queued_resources.request import choose_api_version
from stepkeeper_operator.queued_resources.sight import Scene

__all__ = ["judge_labels", "plan_claim", "plan_labels", "relabel_members"]

_READY: Final = "READY"
_ENDED: Final = {"FAILED", "SUSPENDING", "SUSPENDED", "DELETING"}
_MOST_AT_ONCE: Final = 8
_NAMED: Final = 3
_REFUSED: Final = {ErrorKind.TERMINAL, ErrorKind.NOT_FOUND, ErrorKind.CREDENTIALS}


def plan_claim(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Plan the next step to own what has no owner and is what the spec asks for. None: it is the object's."""
    found, sight = scene.sight.resource, scene.sight
    assert found is not None  # the caller has seen it
    missing = set(found.node_ids) - {node.id for node in sight.live}
    stuck = [node.id for node in sight.unlabelled if node.state != _READY]
    if missing or stuck or not sight.live:
        return _plan_later(found, status, scene)
    first = sight.live[0]
    if first in sight.unlabelled:
        return _plan_writing(resource, book(status, claimed_at=None), scene, only=first)
    waiting = _plan_wait(status, scene)
    if waiting is not None or not sight.unlabelled:
        return waiting
    return _plan_writing(resource, status, scene)


def _plan_later(found: CloudQueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    status, settings = book(status, claimed_at=None), scene.settings
    if found.state in _ENDED:
        return Plan(status=status, look_s=settings.poll_waiting_s, accepted=_refuse(found))
    text = f"{found.name} exists, is nobody's and is what the spec asks for. It is adopted once its nodes are READY"
    return Plan(status=status, look_s=settings.poll_active_s, accepted=_await(text))


def _plan_writing(
    resource: QueuedResource, status: QueuedResourceStatus, scene: Scene, *, only: CloudNode | None = None
) -> Plan:
    return Plan(
        status=status,
        actions=plan_labels(resource, status, scene, only=only),
        look_s=scene.settings.poll_fast_s,
        accepted=judge_labels(status, scene),
    )


def plan_labels(
    resource: QueuedResource, status: QueuedResourceStatus, scene: Scene, *, only: CloudNode | None = None
) -> tuple[Action, ...]:
    """Plan the labels that are missing. The cluster's nodes come first: the cloud's tell which object they name."""
    former = relabel_members(scene)
    unlabelled = scene.sight.unlabelled if only is None else (only,)
    nodes = [node for node in unlabelled if node.state == _READY][:_MOST_AT_ONCE]
    found, not_before = scene.sight.resource, status.bookkeeping.not_before
    if former or not nodes or found is None or (not_before is not None and scene.now < not_before):
        return former
    labels = make_labels(scene.meta, scene.observed.cluster_id)
    return (
        LabelNodes(
            place=found.place,
            cloud_id=found.id,
            node_ids=tuple(node.id for node in nodes),
            labels=labels,
            version=choose_api_version(resource.spec)[0],
        ),
    )


def relabel_members(scene: Scene) -> tuple[Relabel, ...]:
    """Take over the cluster's nodes of these machines that name an earlier object of this name."""
    hosts = match_members(scene.sight.live, scene.observed.former).values()
    return tuple(Relabel(member=member) for members in hosts for member in members)


def judge_labels(status: QueuedResourceStatus, scene: Scene) -> Finding | None:
    """Say that labels are still missing. None: none is, or the cloud has refused them and its own words tell."""
    nodes = [node.id for node in scene.sight.unlabelled if node.state == _READY]
    refused = status.error is not None and status.error.verb == Verb.LABEL
    if not nodes or (refused and error_kind(status) in _REFUSED):
        return None
    more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
    return _await(f"writes this object's labels on node {', '.join(nodes[:_NAMED])}{more}")


def _plan_wait(status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Wait until nobody can overwrite the labels any more; a list from after that shows whose they are."""
    listing, since = scene.observed.listing, status.bookkeeping.claimed_at
    if since is None:
        since = math.ceil(scene.now)
        status = book(status, claimed_at=since)
    until = since + scene.settings.claim_s
    if listing is not None and listing.asked_at >= until:
        return None
    first = scene.sight.live[0].id
    text = (
        f"node {first} carries this object's labels; all are adopted if it still does at {render_time(until)}"
    )
    return Plan(status=status, look_s=scene.settings.poll_fast_s, accepted=_await(text))


def _await(message: str) -> Finding:
    kind = QueuedResourceConditionType.ACCEPTED
    return Finding(type=kind, status=None, reason="Adopting", message=message)


def _refuse(found: CloudQueuedResource) -> Finding:
    text = (
        f"{found.name} exists and is {found.state}. It has no labels that say whose it is, and no nodes to write some "
        "on, so it isn't touched: delete it (gcloud compute tpus queued-resources delete --force)"
    )
    kind = QueuedResourceConditionType.ACCEPTED
    return Finding(type=kind, status=False, reason="NotAdoptable", message=text)
