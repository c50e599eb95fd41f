"""Plan what happens while the cloud has nothing of ours under the present id: create, or explain why not. Pure."""

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource
from stepkeeper_operator.cloud_tpu.naming import UID_LABEL, make_cloud_id, parse_number
from stepkeeper_operator.cloud_tpu.request import (
    build_request,
    choose_api_version,
    hash_spec,
    place_of,
    was_changed,
)
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.labels import ADOPT_ANNOTATION, QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.decide.answers import book
from stepkeeper_operator.queued_resources.decide.removal import delete_nodes
from stepkeeper_operator.queued_resources.decision import CreateCloudResource, Plan, judge_accepted
from stepkeeper_operator.queued_resources.sight import Scene, identify

__all__ = ["plan_creation", "plan_recovery"]


def plan_creation(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan to create the cloud resource, which is absent for certain. The status is written before the request."""
    observed, operator, look_s = scene.observed, status.operator, scene.settings.poll_active_s
    obstacle = _find_rest(status, scene)
    if obstacle is not None:
        return obstacle
    expired = _describe_expiry(resource, now=scene.now)
    if expired:
        return Plan(status=status, accepted=judge_accepted(Reason.EXPIRED, expired))
    wait_s = _compute_wait_s(resource, status, scene)
    if wait_s > 0:
        text = f"the next request is sent at {render_time(scene.now + wait_s)}"
        return Plan(status=status, look_s=wait_s, waiting=text)
    if observed.script_error:
        accepted = judge_accepted(Reason.STARTUP_SCRIPT_MISSING, observed.script_error)
        return Plan(status=status, look_s=look_s, accepted=accepted)
    request = build_request(
        resource, number=operator.number, cluster_id=observed.cluster_id, script=observed.script
    )
    status = book(_claim(resource, status, adopted=False), asked_at=int(scene.now), next_try_time=None)
    action = CreateCloudResource(request=request)
    return Plan(
        status=status, actions=(action,), look_s=0.0, waiting="the operator requests it from the cloud"
    )


def plan_recovery(resource: QueuedResource, status: QueuedResourceStatus, found: CloudQueuedResource) -> Plan:
    """Plan to take up a resource of ours that the status doesn't show: just adopted, or somebody has emptied it."""
    meta, events = resource.metadata, tuple[ObjectEvent, ...]()
    number = parse_number(meta.namespace, meta.name, found.id)
    assert number is not None  # the caller has looked
    if status.operator.adopting:
        text = f"{found.name} is this object's now, with its machines and costs: annotation {ADOPT_ANNOTATION} names it"
        events = (ObjectEvent(warning=False, reason="Adopted", message=text),)
    adopted = found.node.get("labels", {}).get(UID_LABEL) != meta.uid
    identity = identify(found) if adopted else ""
    status = book(status, number=number, adopting="", identity=identity, removal=None)
    status = _claim(resource, status, adopted=adopted)
    return Plan(status=status, look_s=0.0, waiting=f"the operator takes {found.id} up", events=events)


def _find_rest(status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Find what an earlier cloud resource has left; it goes before the next one is asked for."""
    rest = [*scene.sight.nodes, *scene.sight.leftovers]
    alive = [member.name for member in scene.observed.members if member.ready]
    if rest:
        text = f"the cloud still has slice {rest[0].id} of an earlier one"
    elif alive and status.operator.number == 0:  # there was no earlier one, as far as anybody knows
        text = (
            f"node {alive[0]} of this cluster names this object and is Ready, but the cloud has no machine of it: take "
            f"the label {QUEUED_RESOURCE_UID_LABEL} from it, or delete the Node"
        )
    else:
        return delete_nodes(status, scene)
    return Plan(status=status, look_s=scene.settings.poll_fast_s, waiting=text)


def _describe_expiry(resource: QueuedResource, *, now: float) -> str:
    """Describe why the request is pointless, however long one waits; empty: it isn't."""
    until = None if resource.spec.queueing is None else resource.spec.queueing.valid_until_time
    if until is None or until > now:
        return ""
    return f"queueing.validUntilTime, {render_time(until)}, has passed: set a later one, or leave it out"


def _compute_wait_s(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> float:
    """Compute the seconds until the resource may be asked for; 0: now.

    A changed spec is asked for at once after an error, since it may be the remedy; but not while a request for the
    old one may still be carried out.
    """
    operator, due = status.operator, status.next_try_time
    if was_changed(resource.spec, operator.spec_hash):
        asked_at = operator.asked_at
        due = None if asked_at is None else asked_at + int(scene.settings.settle_s)
    return 0.0 if due is None else max(0.0, due - scene.now)


def _claim(resource: QueuedResource, status: QueuedResourceStatus, *, adopted: bool) -> QueuedResourceStatus:
    """Return the status with the cloud resource's name in it: from then on, it may exist and be the object's."""
    meta, spec = resource.metadata, resource.spec
    cloud_id = make_cloud_id(meta.namespace, meta.name, status.operator.number)
    update = {
        "cloud_name": f"{place_of(spec).parent}/queuedResources/{cloud_id}",
        "provider": choose_api_version(spec).provider,
        "state": status.state if status.was_seen else QueuedResourceState.PENDING,
    }
    status = status.model_copy(update=update)
    return book(status, created=True, adopted=adopted, spec_hash=hash_spec(spec))
