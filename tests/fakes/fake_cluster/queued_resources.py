"""Make QueuedResources and what is observed around them, for tests of decisions."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.conditions import Condition
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceState,
    QueuedResourceStatus,
    RemovalStatus,
    ResourceOperatorState,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource, Place
from stepkeeper_operator.cloud_tpu.naming import FINALIZER
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.cloud_tpu.request import build_request, hash_spec
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.labels import ADOPT_ANNOTATION
from stepkeeper_operator.queued_resources.decide.answers import update_status
from stepkeeper_operator.queued_resources.decide.queued_resource import decide_queued_resource
from stepkeeper_operator.queued_resources.decision import Decision
from stepkeeper_operator.queued_resources.observed import Observed
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.queued_resources.subject import Subject

CLUSTER_ID: Final = "cluster-uid"
NOW: Final = 10_000.0
SETTINGS: Final = CloudSettings()
PLACE: Final = Place(project="my-project", zone="us-central2-b")


def make_resource(
    status: QueuedResourceStatus | None = None,
    *,
    slices: Mapping[str, Any] | None = None,
    deleting: bool = False,
    finalizers: Iterable[str] = (FINALIZER,),
    adopt: str | None = None,
    **spec: Any,
) -> QueuedResource:
    """Make a QueuedResource of one v5e slice of Spot machines, with changes to its spec, that may adopt something."""
    meta: dict[str, Any] = {"name": "v5e", "namespace": "team", "uid": "uid-1"}
    meta |= {
        "finalizers": list(finalizers),
        "annotations": {} if adopt is None else {ADOPT_ANNOTATION: adopt},
    }
    if deleting:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    fields = {
        "project": PLACE.project,
        "zone": PLACE.zone,
        "slices": {
            "accelerator": "v5e",
            "topology": "2x4",
            "image": "v2-alpha-tpuv5-lite",
            **(slices or {}),
        },
        "tier": {"spot": {}},
        **spec,
    }
    raw = {
        "apiVersion": "stepkeeper.dev/v1alpha1",
        "kind": "QueuedResource",
        "metadata": meta,
        "spec": fields,
    }
    resource = QueuedResource.model_validate(raw)
    return resource if status is None else resource.model_copy(update={"status": status})


def make_cloud_resource(resource: QueuedResource, state: str, **changes: Any) -> CloudQueuedResource:
    """Make what the cloud has of the resource's present number."""
    number = resource.status.operator.number
    request = build_request(resource, number=number, cluster_id=CLUSTER_ID, script=None)
    made = CloudQueuedResource(
        place=request.place,
        id=request.id,
        state=state,
        node_ids=request.node_ids,
        node=request.node,
        tier=request.tier,
        queueing=request.queueing,
        reservation_name=request.reservation_name,
        create_time=1000,
    )
    return replace(made, **changes)


def make_node(cloud: CloudQueuedResource, index: int = 0, state: str = "READY", **changes: Any) -> CloudNode:
    node = CloudNode(
        place=cloud.place,
        id=cloud.node_ids[index],
        state=state,
        n_hosts=1,
        addresses=(f"10.0.0.{index}",),
        labels=cloud.node.get("labels", {}),
        queued_resource=cloud.name,
    )
    return replace(node, **changes)


def make_member(name: str, uid: str, **changes: Any) -> Node:
    """Make a Ready node of the cluster, a host of the resource."""
    return replace(Node(name=name, uid=uid, spot=True, unknown_since=None), **changes)


def list_cloud(
    resources: Iterable[CloudQueuedResource], nodes: Iterable[CloudNode] = (), *, asked_at: float = 0.0
) -> Listing:
    return Listing(
        asked_at=asked_at,
        resources={resource.id: resource for resource in resources},
        nodes={node.id: node for node in nodes},
    )


def observe(*resources: CloudQueuedResource, nodes: Iterable[CloudNode] = (), **changes: Any) -> Observed:
    """Make an observation in which the cloud has these resources and nodes."""
    return Observed(cluster_id=CLUSTER_ID, listing=list_cloud(resources, nodes), **changes)


def decide(resource: QueuedResource, observed: Observed, now: float = NOW) -> Decision:
    retain = resource.spec.deletion_policy == "Retain"
    subject = Subject(meta=resource.metadata, status=resource.status, resource=resource, retain=retain)
    return decide_queued_resource(subject, observed, SETTINGS, now=now)


def created(state: QueuedResourceState = QueuedResourceState.PENDING, **spec: Any) -> QueuedResource:
    """Make a resource that was asked for and that the status last saw in `state`."""
    resource = make_resource(**spec)
    operator = ResourceOperatorState(created=True, spec_hash=hash_spec(resource.spec))
    name = make_cloud_resource(resource, "ACTIVE").name
    status = QueuedResourceStatus(state=state, operator=operator, cloud_name=name, observed_generation=1)
    return resource.model_copy(update={"status": status})


def noted(resource: QueuedResource, **changes: Any) -> QueuedResource:
    """Return the resource with changes to its status, to the operator's state in it, and with a removal under way."""
    if "removing" in changes:
        since = changes.pop("removing_since", 0)
        changes["removal"] = RemovalStatus(reason=changes.pop("removing"), start_time=since)
    return resource.model_copy(update={"status": update_status(resource.status, **changes)})


def with_status(resource: QueuedResource, **changes: Any) -> QueuedResource:
    return resource.model_copy(update={"status": resource.status.model_copy(update=changes)})


def after(resource: QueuedResource, decision: Decision) -> QueuedResource:
    return resource.model_copy(update={"status": decision.status})


def find(decision: Decision, kind: str) -> Condition:
    return next(condition for condition in decision.status.conditions if condition.type == kind)


def check(decision: Decision, kind: str, found: str, *words: str) -> None:
    """Check status and reason of a condition that was decided, and words of its message."""
    condition = find(decision, kind)
    assert f"{condition.status}/{condition.reason}" == found
    for each in words:
        assert each in condition.message


def kinds(decision: Decision) -> list[type]:
    return [type(action) for action in decision.actions]


def deleting(state: QueuedResourceState = QueuedResourceState.ACTIVE, **spec: Any) -> QueuedResource:
    """Make one that was asked for, and whose deletion was asked for."""
    resource = created(state, **spec)
    meta = resource.metadata.model_copy(update={"deletion_timestamp": 1})
    return resource.model_copy(update={"metadata": meta})
