"""Make the situations that a QueuedResource can be in: its status, and what the cloud has under its name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from fake_cluster.queued_resources import (
    NOW,
    created,
    make_cloud_resource,
    make_node,
    make_resource,
    noted,
)

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource

__all__ = ["SITUATIONS", "STATES"]

STATES: Final = {
    "CREATING": QueuedResourceState.CREATING,
    "ACCEPTED": QueuedResourceState.ACCEPTED,
    "WAITING_FOR_RESOURCES": QueuedResourceState.WAITING,
    "PROVISIONING": QueuedResourceState.PROVISIONING,
    "ACTIVE": QueuedResourceState.ACTIVE,
    "SUSPENDING": QueuedResourceState.SUSPENDING,
    "SUSPENDED": QueuedResourceState.SUSPENDED,
    "FAILED": QueuedResourceState.FAILED,
    "DELETING": QueuedResourceState.DELETING,
    "SOMETHING_NEW": QueuedResourceState.UNKNOWN,
}
_NODE_STATES: Final = {"PROVISIONING": "CREATING", "ACTIVE": "READY", "SUSPENDING": "TERMINATED"}
_LONG_AGO: Final = int(NOW) - 1000

_Parts = tuple[QueuedResource, tuple[CloudQueuedResource, ...], tuple[CloudNode, ...]]
_Builder = Callable[[dict[str, Any]], _Parts]


def _present(state: str, node_state: str | None = None, **bookkeeping: Any) -> _Builder:
    """Build one that exists in this state, as its status says."""

    def build(spec: dict[str, Any]) -> _Parts:
        resource = created(STATES[state], **spec)
        if state == "ACTIVE":
            resource = noted(resource, active_since=_LONG_AGO)
        cloud = make_cloud_resource(resource, state)
        seen = node_state or _NODE_STATES.get(state)
        ids = range(len(cloud.node_ids)) if seen is not None else ()
        nodes = tuple(make_node(cloud, index, seen or "") for index in ids)
        return noted(resource, **bookkeeping), (cloud,), nodes

    return build


def _absent(state: QueuedResourceState = QueuedResourceState.PENDING, **bookkeeping: Any) -> _Builder:
    """Build one that the cloud has nothing of."""

    def build(spec: dict[str, Any]) -> _Parts:
        return noted(created(state, **spec), **bookkeeping), (), ()

    return build


def _new(spec: dict[str, Any]) -> _Parts:
    return make_resource(**spec), (), ()


def _found(labels: dict[str, str | None] | None, *, state: str = "ACTIVE", differs: bool = False) -> _Builder:
    """Build one that is new, under whose name the cloud has something with other labels; None: without any."""

    def build(spec: dict[str, Any]) -> _Parts:
        resource = make_resource(**spec)
        made = make_cloud_resource(resource, state)
        known = {} if labels is None else {**made.node["labels"], **labels}
        node = {**made.node, "labels": {key: value for key, value in known.items() if value is not None}}
        if differs:
            node["accelerator_type"] = "v5litepod-256"
        cloud = replace(made, node=node)
        nodes = tuple(make_node(cloud, index) for index in range(len(cloud.node_ids)))
        return resource, (cloud,), nodes

    return build


def _stray(spec: dict[str, Any]) -> _Parts:
    earlier = make_cloud_resource(created(**spec), "ACTIVE")
    resource = noted(created(QueuedResourceState.ACTIVE, **spec), number=1, active_since=_LONG_AGO)
    cloud = make_cloud_resource(resource, "ACTIVE")
    nodes = tuple(make_node(cloud, index) for index in range(len(cloud.node_ids)))
    return resource, (cloud, earlier), nodes


def _unseen_nodes(spec: dict[str, Any]) -> _Parts:
    resource, clouds, _ = _present("ACTIVE")(spec)
    return resource, clouds, ()


SITUATIONS: Final[dict[str, _Builder]] = {
    **{state: _present(state) for state in STATES},
    "active, preempted": _present("ACTIVE", "PREEMPTED"),
    "active, terminated": _present("ACTIVE", "TERMINATED"),
    "active, under repair": _present("ACTIVE", "REPAIRING"),
    "active, without nodes": _unseen_nodes,
    "nothing asked for": _new,
    "asked for": _absent(),
    "asked for, on its way": _absent(asked_at=int(NOW) - 1),
    "vanished": _absent(QueuedResourceState.ACTIVE, active_since=_LONG_AGO),
    "gone for good": _absent(QueuedResourceState.GONE, created=False, number=1),
    "between two": _absent(created=False, number=1, not_before=int(NOW) + 500, spec_hash=""),
    "due again": _absent(created=False, number=1, not_before=int(NOW) - 1, spec_hash=""),
    "being replaced": _present("SUSPENDED", removing="Suspended", removing_since=int(NOW) - 5),
    "being replaced, deleted": _present("DELETING", removing="Suspended", removing_since=int(NOW) - 5),
    "being replaced, gone": _absent(
        QueuedResourceState.DELETING, removing="Preempted", removing_since=int(NOW) - 5
    ),
    "somebody else's": _found({"stepkeeper-cluster": "another", "stepkeeper-uid": "another"}),
    "of an earlier object": _found({"stepkeeper-uid": "uid-0"}),
    "unlabelled": _found(None),
    "unlabelled and different": _found(None, differs=True),
    "ours, the status lost": _found({}),
    "a stray": _stray,
}
