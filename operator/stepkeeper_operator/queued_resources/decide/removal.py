"""Remove a cloud resource: drain its machines, delete it, wait until the cloud has none of it, remove its nodes. Pure.

It needs nothing of a spec: a resource goes also where its spec can't be read.
"""

from dataclasses import dataclass
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceStatus
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudQueuedResource
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.queued_resources.decide.answers import book, describe_error
from stepkeeper_operator.queued_resources.decide.problems import name_some
from stepkeeper_operator.queued_resources.decision import (
    Action,
    Cordon,
    DeleteCloudResource,
    DeleteNode,
    EvictPod,
)
from stepkeeper_operator.queued_resources.naming import make_request_id
from stepkeeper_operator.queued_resources.observed import Verb
from stepkeeper_operator.queued_resources.pacing import compute_rest_s
from stepkeeper_operator.queued_resources.sight import Presence, Scene

__all__ = ["Removal", "begin_removal", "delete_nodes", "delete_resource", "plan_removal"]

_DRAIN_LOOK_S: Final = 3.0
_NODE_LOOK_S: Final = 1.0
_CORDON_REST_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The next step of a removal."""

    actions: tuple[Action, ...] = ()
    look_s: float | None = None
    waiting: str = ""
    done: bool = False
    """True: neither the cloud nor the cluster has anything of it."""


def begin_removal(status: QueuedResourceStatus, why: str, *, now: float) -> QueuedResourceStatus:
    """Return the status with the decision to remove the present one. A removal that goes on keeps its time."""
    since = status.bookkeeping.removing_since
    fresh: dict[str, Any] = (
        {} if since is not None else {"retries": 0, "failed_deletions": 0, "not_before": None}
    )
    return book(status, removing=why, removing_since=int(now) if since is None else since, **fresh)


def plan_removal(status: QueuedResourceStatus, scene: Scene) -> Removal:
    """Plan the next step. Each step waits for the one before it to be seen."""
    observed, sight = scene.observed, scene.sight
    drain = _plan_drain(status, scene)
    if drain is not None:
        return drain
    if sight.presence is Presence.UNKNOWN:
        why = "" if observed.error is None else f": {observed.error}"
        text = f"nobody can tell what the cloud has of it{why}"
        return Removal(actions=_cordon(scene), look_s=scene.settings.poll_fast_s, waiting=text)
    present = [] if sight.resource is None or not sight.is_ours else [sight.resource]
    if present or sight.strays:
        return _plan_delete(status, scene, [*present, *sight.strays])
    rest = _find_rest(status, scene)
    if rest is not None:
        return rest
    if (
        observed.members and sight.presence is not Presence.FOREIGN
    ):  # else they are on another object's machines
        actions, look_s = delete_nodes(scene)
        names = name_some([member.name for member in observed.members])
        return Removal(actions=actions, look_s=look_s, waiting=f"removes node {names} of the cluster")
    return Removal(done=True)


def delete_resource(
    meta: ObjectMeta, status: QueuedResourceStatus, resource: CloudQueuedResource
) -> DeleteCloudResource:
    """Make the request to delete it. After each failure it is another one: the API remembers what became of the first.

    An accepted request may fail yet, by its operation, so it doesn't start the count of failures anew.
    """
    bookkeeping = status.bookkeeping
    detail = f"{resource.id}/{bookkeeping.removing_since}/{bookkeeping.failed_deletions}"
    return DeleteCloudResource(
        place=resource.place,
        cloud_id=resource.id,
        request_id=make_request_id(meta.uid, bookkeeping.number, "delete", detail),
        version=ApiVersion.V2ALPHA1 if status.api_version == ApiVersion.V2ALPHA1 else ApiVersion.V2,
        bookkeeping=bookkeeping,
    )


def delete_nodes(scene: Scene) -> tuple[tuple[Action, ...], float]:
    """Make the deletions of all Node objects, and the seconds until the next look: longer where all are refused."""
    rests_s = {
        member: compute_rest_s(member.deletion_refusal, scene.settings, now=scene.now)
        for member in scene.observed.members
    }
    due = tuple(DeleteNode(member=member) for member, rest_s in rests_s.items() if rest_s == 0)
    return due, max(_NODE_LOOK_S, min(rests_s.values()))


def _plan_drain(status: QueuedResourceStatus, scene: Scene) -> Removal | None:
    """Let the pods on living machines end, for a bounded time. None: the machines can go."""
    observed = scene.observed
    alive = {member.name for member in observed.members if member.ready}
    if scene.sight.presence not in {Presence.OURS, Presence.UNKNOWN} or not alive:
        return None
    if observed.pods is None:  # they are looked for once the status says that it is being removed
        return Removal(actions=_cordon(scene), look_s=0.0, waiting="cordons its nodes")
    pods = [pod for pod in observed.pods if pod.node in alive]
    since = status.bookkeeping.removing_since
    ends_at = scene.settings.drain_s + (scene.now if since is None else since)
    if not pods or scene.now >= ends_at:
        return None
    evictions = tuple(EvictPod(pod=pod) for pod in pods if not pod.stopping)
    names = name_some([f"{pod.namespace}/{pod.name}" for pod in pods])
    return Removal(
        actions=(*_cordon(scene), *evictions),
        look_s=min(_DRAIN_LOOK_S, ends_at - scene.now),
        waiting=f"pods on its nodes have until {render_time(ends_at)} to end: {names}",
    )


def _plan_delete(status: QueuedResourceStatus, scene: Scene, present: list[CloudQueuedResource]) -> Removal:
    operation, not_before = status.operation, status.bookkeeping.not_before
    names = name_some([resource.id for resource in present])
    fast_s, staying = scene.settings.poll_fast_s, [r for r in present if r.state != "DELETING"]
    if not staying or (operation is not None and operation.verb == Verb.DELETE):
        return Removal(look_s=fast_s, waiting=f"the cloud deletes {names}")
    if not_before is not None and scene.now < not_before:
        text = f"the deletion of {names} has failed: {describe_error(status)}"
        return Removal(look_s=not_before - scene.now, waiting=text)
    action = delete_resource(scene.meta, status, staying[0])
    text = f"the cloud deletes {names}"
    return Removal(actions=(*_cordon(scene), action), look_s=0.0, waiting=text)


def _find_rest(status: QueuedResourceStatus, scene: Scene) -> Removal | None:
    """Find what the cloud still has, or may still get, of a resource that isn't listed any more."""
    fast_s = scene.settings.poll_fast_s
    rest = [*scene.sight.nodes, *scene.sight.leftovers]
    if rest:
        names = name_some([node.id for node in rest])
        text = f"the cloud still has node {names}; if it stays, delete it: gcloud compute tpus tpu-vm delete"
        return Removal(look_s=fast_s, waiting=text)
    if status.operation is not None:
        return Removal(look_s=fast_s, waiting=f"waits for the end of {status.operation.name}")
    asked_at = status.bookkeeping.asked_at
    if asked_at is not None and (left_s := asked_at + scene.settings.settle_s - scene.now) > 0:
        text = "a request to create it may still be on its way"
        return Removal(look_s=min(fast_s, left_s), waiting=text)
    return None


def _cordon(scene: Scene) -> tuple[Cordon, ...]:
    refused_at = scene.observed.cordon_refused_at
    rests = refused_at is not None and scene.now < refused_at + _CORDON_REST_S
    if rests or scene.sight.presence is Presence.FOREIGN:
        return ()
    return tuple(Cordon(member=member) for member in scene.observed.members if not member.cordoned)
