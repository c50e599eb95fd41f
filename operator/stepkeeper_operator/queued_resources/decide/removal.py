"""Remove a cloud resource: drain its machines, delete it, wait for the end of it, delete its Node objects. Pure.

It doesn't use the spec, so that a resource with an unreadable spec can be removed.
"""

from dataclasses import replace
from typing import Final

from stepkeeper_operator.api.base import ObjectMeta
from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
    RemovalStatus,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource
from stepkeeper_operator.cloud_tpu.naming import FINALIZER, make_request_id
from stepkeeper_operator.cloud_tpu.request import read_api_version
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.kinds.decision import ObjectEvent
from stepkeeper_operator.labels import ADOPT_ANNOTATION
from stepkeeper_operator.queued_resources.cloud_view import CloudView, View
from stepkeeper_operator.queued_resources.decide.adoption import uncordon_members
from stepkeeper_operator.queued_resources.decide.answers import (
    PERMANENT,
    describe_blindness,
    describe_error,
    fold_answers,
    update_status,
)
from stepkeeper_operator.queued_resources.decide.conditions import conclude
from stepkeeper_operator.queued_resources.decide.mirror import mirror_cloud
from stepkeeper_operator.queued_resources.decide.problems import degraded, find_obstacles, name_some
from stepkeeper_operator.queued_resources.decision import (
    Action,
    Cordon,
    Decision,
    DeleteCloudResource,
    DeleteNode,
    EvictPod,
    Plan,
    SetFinalizer,
)
from stepkeeper_operator.queued_resources.observed import CORDON_RETRY_S, Verb
from stepkeeper_operator.queued_resources.subject import has_no_cloud_resource

__all__ = ["begin_removal", "decide_deletion", "delete_nodes", "delete_resource", "plan_removal"]

_DRAIN_POLL_S: Final = 3.0
_NODE_POLL_S: Final = 1.0


def decide_deletion(before: QueuedResourceStatus, view: View, *, retain: bool) -> Decision:
    """Decide the next step of a deletion. The finalizer is removed last: until then, the object shows what is left."""
    observed, cloud = view.observed, view.cloud
    release: tuple[Action, ...] = (*uncordon_members(view), SetFinalizer(present=False))
    if FINALIZER not in view.meta.finalizers:
        return Decision(status=before)
    if retain:
        return Decision(status=before, actions=release, events=_describe_retained(before))
    # If the status may have been emptied, only the cloud shows whether there is a resource.
    unknown = before.observed_generation is None and observed.error is not None
    left = unknown or cloud.resource or cloud.duplicates or cloud.leftovers
    if has_no_cloud_resource(before) and not left:
        return Decision(status=before, actions=release)
    status = begin_removal(fold_answers(before, view), Reason.DELETED, now=view.now)
    plan = plan_removal(status, view)
    # If another object owns the resource, nothing is to be deleted, and a refusal by the cloud blocks nothing.
    refused = observed.error is not None and observed.error.kind in PERMANENT
    if plan is None or (refused and _is_lost(status, cloud)):
        return Decision(status=before, actions=release, events=_describe_lost(status, cloud))
    return conclude(before, mirror_cloud(status, view), plan, _judge(plan), view)


def begin_removal(status: QueuedResourceStatus, why: Reason, *, now: float) -> QueuedResourceStatus:
    """Return the status with the decision to remove the current one. A removal in progress keeps its start time."""
    known = status.removal
    if known is not None:
        return update_status(status, removal=RemovalStatus(reason=why, start_time=known.start_time))
    removal = RemovalStatus(reason=why, start_time=int(now))
    return update_status(status, removal=removal, retries=0, next_try_time=None)


def plan_removal(status: QueuedResourceStatus, view: View) -> Plan | None:
    """Plan the next step. Each starts once the result of the previous one is observed. None: nothing is left."""
    present = [] if view.cloud.resource is None else [view.cloud.resource]
    plan = (
        _plan_drain(status, view)
        or _plan_deletion(status, view, [*present, *view.cloud.duplicates])
        or _plan_leftovers(status, view)
        or delete_nodes(status, view)
    )
    return plan and replace(plan, problems=find_obstacles(status, view))


def delete_resource(
    meta: ObjectMeta, status: QueuedResourceStatus, resource: CloudQueuedResource
) -> DeleteCloudResource:
    """Make the request to delete it. Its id changes after a failure: the API repeats the result for a known id."""
    operator = status.operator
    since = status.removal and status.removal.start_time
    detail = f"{resource.id}/{since}/{operator.retries}"
    return DeleteCloudResource(
        place=resource.place,
        cloud_id=resource.id,
        request_id=make_request_id(meta.uid, operator.number, "delete", detail),
        version=read_api_version(status),
        operator=operator,
    )


def delete_nodes(status: QueuedResourceStatus, view: View) -> Plan | None:
    """Plan the deletion of the Node objects of deleted machines. None: the object has none."""
    members = view.observed.members
    refused = any(member.uid in view.observed.refusals for member in members)
    # If there is a foreign resource, its machines are another object's, and they exist.
    if not members or view.cloud.foreign is not None:
        return None
    return Plan(
        status=status,
        actions=tuple(DeleteNode(member=member) for member in members),
        requeue_after_s=view.settings.poll_fast_s if refused else _NODE_POLL_S,
        waiting=f"the operator deletes Node {name_some([member.name for member in members])}",
        problems=find_obstacles(status, view),
    )


def _plan_drain(status: QueuedResourceStatus, view: View) -> Plan | None:
    """Wait for the pods on running machines to end, for a limited time. None: the machines can be deleted."""
    observed, cloud = view.observed, view.cloud
    alive = {member.name for member in observed.members if member.ready}
    lost = _is_lost(status, cloud)
    # Without a listing, the machines are assumed to exist and to be the object's own, unless the status shows a loss.
    machines_may_exist = cloud.resource is not None or not (cloud.known or lost)
    if alive and machines_may_exist:
        if observed.pods is None:  # they are read once the status shows the removal
            text = "the operator cordons its nodes"
            return Plan(status=status, actions=_cordon(view), requeue_after_s=0.0, waiting=text)
        pods = [pod for pod in observed.pods if pod.node in alive]
        ends_at = view.settings.drain_s + (view.now if status.removal is None else status.removal.start_time)
        if pods and view.now < ends_at:
            names = name_some([f"{pod.namespace}/{pod.name}" for pod in pods])
            evictions = (EvictPod(pod=pod) for pod in pods if not pod.stopping)
            text = f"pods on its nodes have until {render_time(ends_at)} to end: {names}"
            again_s = min(_DRAIN_POLL_S, ends_at - view.now)
            actions: tuple[Action, ...] = (*_cordon(view), *evictions)
            return Plan(status=status, actions=actions, requeue_after_s=again_s, waiting=text)
    if not cloud.known:
        cordons, again_s = () if lost else _cordon(view), view.settings.poll_fast_s
        text = describe_blindness(observed.error, again_s=again_s)
        return Plan(status=status, actions=cordons, requeue_after_s=again_s, waiting=text)
    return None


def _plan_deletion(
    status: QueuedResourceStatus, view: View, present: list[CloudQueuedResource]
) -> Plan | None:
    if not present:
        return None
    operation, next_at = status.operation, status.next_try_time
    names = name_some([resource.id for resource in present])
    text = f"the cloud deletes {names}"
    staying = [r for r in present if r.phase is not QueuedResourceState.DELETING]
    if not staying or (operation is not None and operation.verb == Verb.DELETE):
        return Plan(status=status, requeue_after_s=view.settings.poll_fast_s, waiting=text)
    if next_at is not None and view.now < next_at:
        text = f"the deletion of {names} has failed: {describe_error(status)}"
        return Plan(status=status, requeue_after_s=next_at - view.now, waiting=text)
    action = delete_resource(view.meta, status, staying[0])
    return Plan(status=status, actions=(*_cordon(view), action), requeue_after_s=0.0, waiting=text)


def _plan_leftovers(status: QueuedResourceStatus, view: View) -> Plan | None:
    """Wait for leftovers and pending requests of a resource that is no longer listed."""
    requeue_after_s, asked_at = view.settings.poll_fast_s, status.operator.asked_at
    rest = [node.id for node in (*view.cloud.nodes, *view.cloud.leftovers)]
    left_s = 0.0 if asked_at is None else asked_at + view.settings.settle_s - view.now
    if rest:
        text = f"the cloud still has slice {name_some(rest)}; if it stays, delete it: gcloud compute tpus tpu-vm delete"
    elif status.operation is not None:
        text = f"the operator waits for the end of {status.operation.name}"
    elif left_s > 0:
        requeue_after_s, text = min(requeue_after_s, left_s), "a request to create it may still be pending"
    else:
        return None
    return Plan(status=status, requeue_after_s=requeue_after_s, waiting=text)


def _cordon(view: View) -> tuple[Cordon, ...]:
    refused_at = view.observed.cordon_refused_at
    paused = refused_at is not None and view.now < refused_at + CORDON_RETRY_S
    if paused or view.cloud.foreign is not None:
        return ()
    return tuple(Cordon(member=member) for member in view.observed.members if not member.unschedulable)


def _judge(plan: Plan) -> tuple[ConditionUpdate, ...]:
    kinds, short = QueuedResourceConditionType, "it is being deleted"
    text = f"{short}: {plan.waiting}. Changes applied now are lost with it: apply it again once it is gone"
    return (
        ConditionUpdate(type=kinds.ACTIVE, status=False, reason=Reason.DELETED, message=text),
        ConditionUpdate(type=kinds.NODES_JOINED, status=False, reason=Reason.DELETED, message=short),
        degraded(plan.problems),
    )


def _is_lost(status: QueuedResourceStatus, cloud: CloudView) -> bool:
    """Return True if another object owns the current one, by the listing, or else by the status."""
    return cloud.foreign is not None or (status.operator.lost and not cloud.known)


def _describe_lost(status: QueuedResourceStatus, cloud: CloudView) -> tuple[ObjectEvent, ...]:
    had = status.operator.lost or status.operator.adopted or status.was_seen
    if not had or status.state is QueuedResourceState.DELETING or not _is_lost(status, cloud):
        return ()
    text = f"{status.cloud_name} and its machines stay in the cloud: they have the label of another object"
    return (ObjectEvent(warning=True, reason=Reason.OWNED_BY_OTHER, message=text),)


def _describe_retained(status: QueuedResourceStatus) -> tuple[ObjectEvent, ...]:
    if not status.operator.created or status.operator.lost:
        return ()
    operation = status.operation
    deletes = operation is not None and operation.verb == Verb.DELETE
    if deletes or status.state is QueuedResourceState.DELETING:
        text = f"{status.cloud_name} was already being deleted when deletionPolicy became Retain, and this continues"
    else:
        text = (
            f"{status.cloud_name} and its machines stay in the cloud, and cost money: deletionPolicy is Retain. "
            f"To take them over with a new object, set annotation "
            f"{ADOPT_ANNOTATION}: {status.cloud_name.rpartition('/')[2]}"
        )
    return (ObjectEvent(warning=True, reason="Retained", message=text),)
