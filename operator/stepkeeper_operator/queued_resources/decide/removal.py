"""Remove a cloud resource: drain its machines, delete it, wait until the cloud has none of it, remove its nodes. Pure.

It needs nothing of a spec: a resource goes also where its spec can't be read.
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
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.labels import ADOPT_ANNOTATION
from stepkeeper_operator.queued_resources.decide.adoption import uncordon_members
from stepkeeper_operator.queued_resources.decide.answers import LASTING, book, describe_error, fold_answers
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
from stepkeeper_operator.queued_resources.observed import CORDON_REST_S, Verb
from stepkeeper_operator.queued_resources.sight import Scene, Sight
from stepkeeper_operator.queued_resources.subject import has_nothing

__all__ = ["begin_removal", "decide_deletion", "delete_nodes", "delete_resource", "plan_removal"]

_DRAIN_LOOK_S: Final = 3.0
_NODE_LOOK_S: Final = 1.0


def decide_deletion(before: QueuedResourceStatus, scene: Scene, *, retain: bool) -> Decision:
    """Decide the next step of a deletion. The finalizer goes last: until then, the object shows what is left."""
    observed, sight = scene.observed, scene.sight
    lets_go: tuple[Action, ...] = (*uncordon_members(scene), SetFinalizer(present=False))
    if FINALIZER not in scene.meta.finalizers:
        return Decision(status=before)
    if retain:
        return Decision(status=before, actions=lets_go, events=_describe_retained(before))
    # Somebody may have emptied the status: then only the cloud knows whether it has anything.
    unknown = before.observed_generation is None and observed.error is not None
    if has_nothing(before) and not (unknown or sight.resource or sight.strays or sight.leftovers):
        return Decision(status=before, actions=lets_go)
    status = begin_removal(fold_answers(before, scene), Reason.DELETED, now=scene.now)
    plan = plan_removal(status, scene)
    refused = observed.error is not None and observed.error.kind in LASTING
    if plan is None or (refused and _is_lost(status, sight)):
        return Decision(status=before, actions=lets_go, events=_describe_lost(status, sight))
    return conclude(before, mirror_cloud(status, scene), plan, _judge(plan), scene)


def begin_removal(status: QueuedResourceStatus, why: Reason, *, now: float) -> QueuedResourceStatus:
    """Return the status with the decision to remove the present one. A removal under way keeps its time."""
    known = status.removal
    if known is not None:
        return book(status, removal=RemovalStatus(reason=why, start_time=known.start_time))
    removal = RemovalStatus(reason=why, start_time=int(now))
    return book(status, removal=removal, retries=0, next_try_time=None)


def plan_removal(status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Plan the next step. Each waits for the one before it to be seen. None: nothing of it is left."""
    present = [] if scene.sight.resource is None else [scene.sight.resource]
    plan = (
        _plan_drain(status, scene)
        or _plan_deletion(status, scene, [*present, *scene.sight.strays])
        or _plan_rest(status, scene)
        or delete_nodes(status, scene)
    )
    return plan and replace(plan, problems=find_obstacles(status, scene))


def delete_resource(
    meta: ObjectMeta, status: QueuedResourceStatus, resource: CloudQueuedResource
) -> DeleteCloudResource:
    """Make the request to delete it. After a failure it is another one: the API remembers what became of the first."""
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


def delete_nodes(status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Plan the deletion of all Node objects, of machines that are gone. None: there are none of ours."""
    members = scene.observed.members
    refused = any(member.uid in scene.observed.refusals for member in members)
    if not members or scene.sight.foreign is not None:  # they are on another object's machines
        return None
    return Plan(
        status=status,
        actions=tuple(DeleteNode(member=member) for member in members),
        look_s=scene.settings.poll_fast_s if refused else _NODE_LOOK_S,
        waiting=f"the operator deletes Node {name_some([member.name for member in members])} of the cluster",
        problems=find_obstacles(status, scene),
    )


def _plan_drain(status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Let the pods on living machines end, for a bounded time. None: the machines can go."""
    observed, sight = scene.observed, scene.sight
    alive = {member.name for member in observed.members if member.ready}
    lost = _is_lost(status, sight)
    if alive and (sight.resource is not None or not (sight.known or lost)):
        if observed.pods is None:  # they are looked for once the status shows the removal
            return Plan(
                status=status, actions=_cordon(scene), look_s=0.0, waiting="the operator cordons its nodes"
            )
        pods = [pod for pod in observed.pods if pod.node in alive]
        ends_at = scene.settings.drain_s + (
            scene.now if status.removal is None else status.removal.start_time
        )
        if pods and scene.now < ends_at:
            names = name_some([f"{pod.namespace}/{pod.name}" for pod in pods])
            evictions = (EvictPod(pod=pod) for pod in pods if not pod.stopping)
            text = f"pods on its nodes have until {render_time(ends_at)} to end: {names}"
            look_s = min(_DRAIN_LOOK_S, ends_at - scene.now)
            return Plan(status=status, actions=(*_cordon(scene), *evictions), look_s=look_s, waiting=text)
    if not sight.known:
        why = "" if observed.error is None else f": {observed.error}"
        text = f"the operator can't see what the cloud has of it{why}"
        cordons = () if lost else _cordon(scene)
        return Plan(status=status, actions=cordons, look_s=scene.settings.poll_fast_s, waiting=text)
    return None


def _plan_deletion(
    status: QueuedResourceStatus, scene: Scene, present: list[CloudQueuedResource]
) -> Plan | None:
    if not present:
        return None
    operation, next_at = status.operation, status.next_try_time
    names = name_some([resource.id for resource in present])
    text, staying = f"the cloud deletes {names}", [r for r in present if r.state != "DELETING"]
    if not staying or (operation is not None and operation.verb == Verb.DELETE):
        return Plan(status=status, look_s=scene.settings.poll_fast_s, waiting=text)
    if next_at is not None and scene.now < next_at:
        text = f"the deletion of {names} has failed: {describe_error(status)}"
        return Plan(status=status, look_s=next_at - scene.now, waiting=text)
    action = delete_resource(scene.meta, status, staying[0])
    return Plan(status=status, actions=(*_cordon(scene), action), look_s=0.0, waiting=text)


def _plan_rest(status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Wait for what the cloud still has, or may still get, of a resource that isn't listed any more."""
    look_s, asked_at = scene.settings.poll_fast_s, status.operator.asked_at
    rest = [node.id for node in (*scene.sight.nodes, *scene.sight.leftovers)]
    left_s = 0.0 if asked_at is None else asked_at + scene.settings.settle_s - scene.now
    if rest:
        text = f"the cloud still has slice {name_some(rest)}; if it stays, delete it: gcloud compute tpus tpu-vm delete"
    elif status.operation is not None:
        text = f"the operator waits for the end of {status.operation.name}"
    elif left_s > 0:
        look_s, text = min(look_s, left_s), "a request to create it may still be on its way"
    else:
        return None
    return Plan(status=status, look_s=look_s, waiting=text)


def _cordon(scene: Scene) -> tuple[Cordon, ...]:
    refused_at = scene.observed.cordon_refused_at
    rests = refused_at is not None and scene.now < refused_at + CORDON_REST_S
    if rests or scene.sight.foreign is not None:
        return ()
    return tuple(Cordon(member=member) for member in scene.observed.members if not member.unschedulable)


def _judge(plan: Plan) -> tuple[ConditionUpdate, ...]:
    kinds, short = QueuedResourceConditionType, "it is being deleted"
    text = f"{short}: {plan.waiting}. What is applied now goes, too: apply it again once it is gone"
    return (
        ConditionUpdate(type=kinds.ACTIVE, status=False, reason=Reason.DELETED, message=text),
        ConditionUpdate(type=kinds.NODES_JOINED, status=False, reason=Reason.DELETED, message=short),
        degraded(plan.problems),
    )


def _is_lost(status: QueuedResourceStatus, sight: Sight) -> bool:
    """Return True where another object has the present one: the cloud shows that, or the status did at last."""
    return sight.foreign is not None or (status.operator.lost and not sight.known)


def _describe_lost(status: QueuedResourceStatus, sight: Sight) -> tuple[ObjectEvent, ...]:
    had = status.operator.lost or status.operator.adopted or status.was_seen
    if not had or status.state is QueuedResourceState.DELETING or not _is_lost(status, sight):
        return ()
    text = f"{status.cloud_name} and its machines stay in the cloud: they carry the label of another object"
    return (ObjectEvent(warning=True, reason=Reason.OWNED_BY_OTHER, message=text),)


def _describe_retained(status: QueuedResourceStatus) -> tuple[ObjectEvent, ...]:
    if not status.operator.created or status.operator.lost:
        return ()
    operation = status.operation
    deletes = operation is not None and operation.verb == Verb.DELETE
    if deletes or status.state is QueuedResourceState.DELETING:
        text = (
            f"{status.cloud_name} was being deleted before deletionPolicy was Retain, and the cloud continues"
        )
    else:
        text = (
            f"{status.cloud_name} and its machines stay in the cloud, and cost money, as deletionPolicy is Retain. "
            f"A new object takes them up by annotation {ADOPT_ANNOTATION}: {status.cloud_name.rpartition('/')[2]}"
        )
    return (ObjectEvent(warning=True, reason="Retained", message=text),)
