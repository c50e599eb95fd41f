"""Plan while the object has no resource under the current id: create one, or explain why not. Pure."""

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
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
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.kinds.decision import ObjectEvent
from stepkeeper_operator.labels import ADOPT_ANNOTATION, QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.cloud_view import View, identify
from stepkeeper_operator.queued_resources.decide.answers import update_status
from stepkeeper_operator.queued_resources.decide.removal import delete_nodes
from stepkeeper_operator.queued_resources.decision import CreateCloudResource, Plan, judge_accepted

__all__ = ["plan_creation", "plan_recovery"]


def plan_creation(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> Plan:
    """Plan to create the cloud resource, which is certainly absent. The status is written before the request."""
    observed, requeue_after_s = view.observed, view.settings.poll_active_s
    removal = _plan_leftovers(status, view)
    if removal is not None:
        return removal
    expired = _describe_expiry(resource, now=view.now)
    if expired:
        return Plan(status=status, accepted=judge_accepted(Reason.EXPIRED, expired))
    wait_s = _compute_wait_s(resource, status, view)
    if wait_s > 0:
        text = f"the next request is sent at {render_time(view.now + wait_s)}"
        return Plan(status=status, requeue_after_s=wait_s, waiting=text)
    if observed.script_error:
        accepted = judge_accepted(Reason.STARTUP_SCRIPT_MISSING, observed.script_error)
        return Plan(status=status, requeue_after_s=requeue_after_s, accepted=accepted)
    number, cluster_id = status.operator.number, observed.cluster_id
    request = build_request(resource, number=number, cluster_id=cluster_id, script=observed.script)
    status = _claim(resource, status, adopted=False)
    status = update_status(status, asked_at=int(view.now), next_try_time=None)
    action, text = CreateCloudResource(request=request), "the operator is sending the request to the cloud"
    return Plan(status=status, actions=(action,), requeue_after_s=0.0, waiting=text)


def plan_recovery(resource: QueuedResource, status: QueuedResourceStatus, found: CloudQueuedResource) -> Plan:
    """Plan to record an own resource that isn't in the status: it was just adopted, or the status was emptied."""
    meta, events = resource.metadata, tuple[ObjectEvent, ...]()
    number = parse_number(meta.namespace, meta.name, found.id)
    assert number is not None  # the caller has checked
    if status.operator.adopting:
        text = (
            f"{found.name} was adopted, with its machines and costs: annotation {ADOPT_ANNOTATION} names it"
        )
        events = (ObjectEvent(warning=False, reason="Adopted", message=text),)
    adopted = found.node.get("labels", {}).get(UID_LABEL) != meta.uid  # the request was another object's
    identity = identify(found) if adopted else ""
    status = update_status(status, number=number, adopting="", identity=identity, removal=None)
    status = _claim(resource, status, adopted=adopted)
    text = f"the operator resumes with {found.id}"
    return Plan(status=status, requeue_after_s=0.0, waiting=text, events=events)


def _plan_leftovers(status: QueuedResourceStatus, view: View) -> Plan | None:
    """Plan the removal of an earlier cloud resource's leftovers, which comes before the next request."""
    rest = [*view.cloud.nodes, *view.cloud.leftovers]
    alive = [member.name for member in view.observed.members if member.ready]
    if rest:
        text = f"the cloud still has slice {rest[0].id} of an earlier cloud resource"
    elif alive and status.operator.number == 0:  # not machines of an earlier cloud resource: there was none
        text = (
            f"node {alive[0]} of this cluster has this object's label and is Ready, but the cloud has no machine of "
            f"this object: remove label {QUEUED_RESOURCE_UID_LABEL} from the Node, or delete the Node"
        )
    else:
        return delete_nodes(status, view)
    return Plan(status=status, requeue_after_s=view.settings.poll_fast_s, waiting=text)


def _describe_expiry(resource: QueuedResource, *, now: float) -> str:
    """Describe why the request has expired; empty: it hasn't."""
    until = None if resource.spec.queueing is None else resource.spec.queueing.valid_until_time
    if until is None or until > now:
        return ""
    return f"queueing.validUntilTime, {render_time(until)}, has passed: set a later one, or remove it"


def _compute_wait_s(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> float:
    """Compute the seconds until the resource may be requested; 0: now.

    A changed spec is requested at once after an error, since it may be the fix, but not while a request for the old
    one may still be carried out.
    """
    operator, due = status.operator, status.next_try_time
    if was_changed(resource.spec, status):
        asked_at = operator.asked_at
        due = None if asked_at is None else asked_at + int(view.settings.settle_s)
    return 0.0 if due is None else max(0.0, due - view.now)


def _claim(resource: QueuedResource, status: QueuedResourceStatus, *, adopted: bool) -> QueuedResourceStatus:
    """Return the status with the cloud resource's name: from then on, it may exist and belong to the object."""
    meta, spec = resource.metadata, resource.spec
    cloud_id = make_cloud_id(meta.namespace, meta.name, status.operator.number)
    update = {
        "cloud_name": f"{place_of(spec).parent}/queuedResources/{cloud_id}",
        "provider": choose_api_version(spec).provider,
        "state": status.state if status.was_seen else QueuedResourceState.PENDING,
    }
    return update_status(status, **update, created=True, adopted=adopted, spec_hash=hash_spec(spec))
