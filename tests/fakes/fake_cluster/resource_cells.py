"""Lay out truth tables of QueuedResources: every situation, every answer of the cloud, every wish of the user."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from fake_cluster.queued_resources import (
    NOW,
    created,
    make_cloud_resource,
    make_member,
    make_node,
    make_resource,
    noted,
    observe,
    with_status,
)
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import CloudOperation, QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import (
    CloudNode,
    CloudOperationState,
    CloudQueuedResource,
    CloudTPUError,
    ErrorKind,
)
from stepkeeper_operator.queued_resources.observed import Observed, Outcome, Verb

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


def _present(state: str, node_state: str | None = None, **operator: Any) -> _Builder:
    """Build one that exists in this state, as its status says."""

    def build(spec: dict[str, Any]) -> _Parts:
        resource = created(STATES[state], **spec)
        if state == "ACTIVE":
            resource = noted(resource, active_since=_LONG_AGO)
        cloud = make_cloud_resource(resource, state)
        seen = node_state or _NODE_STATES.get(state)
        ids = range(len(cloud.node_ids)) if seen is not None else ()
        nodes = tuple(make_node(cloud, index, seen or "") for index in ids)
        return noted(resource, **operator), (cloud,), nodes

    return build


def _absent(state: QueuedResourceState = QueuedResourceState.PENDING, **operator: Any) -> _Builder:
    """Build one that the cloud has nothing of."""

    def build(spec: dict[str, Any]) -> _Parts:
        return noted(created(state, **spec), **operator), (), ()

    return build


def _found(
    labels: dict[str, str | None] | None,
    *,
    state: str = "ACTIVE",
    adopt: str | None = None,
    differs: bool = False,
) -> _Builder:
    """Build one that is new, under whose name the cloud has something with other labels; None: without any."""

    def build(spec: dict[str, Any]) -> _Parts:
        resource = make_resource(adopt=adopt, **spec)
        made = make_cloud_resource(resource, state)
        known = {} if labels is None else {**made.node["labels"], **labels}
        node = {**made.node, "labels": {key: value for key, value in known.items() if value is not None}}
        if differs:
            node["accelerator_config"] = {"type": "V5LITE_POD", "topology": "16x16"}
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


def _stray_of_a_failed_creation(spec: dict[str, Any]) -> _Parts:
    _, (_, earlier), _ = _stray(spec)
    resource = created(**spec)
    return noted(resource, number=1, next_try_time=int(NOW) + 500), (earlier,), ()


def _taken_name(state: str) -> _Builder:
    """Build one that was in this state when it was last seen; now something of somebody else has its name."""

    def build(spec: dict[str, Any]) -> _Parts:
        resource, (cloud,), _ = _present(state, removing="Preempted", removing_since=int(NOW) - 5)(spec)
        return resource, (replace(cloud, node={**cloud.node, "labels": {"stepkeeper-uid": "another"}}),), ()

    return build


SITUATIONS: Final[dict[str, _Builder]] = {
    **{state: _present(state) for state in STATES},
    "active, preempted": _present("ACTIVE", "PREEMPTED"),
    "active, under repair": _present("ACTIVE", "REPAIRING"),
    "active, without nodes": lambda spec: (*_present("ACTIVE")(spec)[:2], ()),
    "nothing asked for": lambda spec: (make_resource(**spec), (), ()),
    "asked for": _absent(),
    "asked for, on its way": _absent(asked_at=int(NOW) - 1),
    "vanished": _absent(QueuedResourceState.ACTIVE, active_since=_LONG_AGO),
    "gone for good": _absent(QueuedResourceState.GONE, created=False, number=1),
    "between two": _absent(created=False, number=1, next_try_time=int(NOW) + 500, spec_hash=""),
    "due again": _absent(created=False, number=1, next_try_time=int(NOW) - 1, spec_hash=""),
    "being replaced": _present("SUSPENDED", removing="Suspended", removing_since=int(NOW) - 5),
    "being replaced, deleted": _present("DELETING", removing="Suspended", removing_since=int(NOW) - 5),
    "being replaced, gone": _absent(
        QueuedResourceState.DELETING, removing="Preempted", removing_since=int(NOW) - 5
    ),
    "somebody else's": _found({"stepkeeper-cluster": "another", "stepkeeper-uid": "another"}),
    "of an earlier object": _found({"stepkeeper-uid": "uid-0"}),
    "of an earlier object, going": _found({"stepkeeper-uid": "uid-0"}, state="DELETING"),
    "of no name, to be adopted": _found(
        {"stepkeeper-uid": "uid-0", "stepkeeper-namespace": None, "stepkeeper-name": None}, adopt="team-v5e"
    ),
    "unlabeled": _found(None),
    "of an earlier object, to be adopted": _found({"stepkeeper-uid": "uid-0"}, adopt="team-v5e"),
    "unlabeled, to be adopted": _found(None, adopt="team-v5e"),
    "different, to be adopted": _found(None, adopt="team-v5e", differs=True),
    "unlabeled, another id to be adopted": _found(None, adopt="v5e"),
    "ours, the status lost": _found({}),
    "a stray": _stray,
    "a stray, the next one waits": _stray_of_a_failed_creation,
    "being replaced, gone, its name is taken": _taken_name("DELETING"),
    "being replaced, its name is taken": _taken_name("ACTIVE"),
}

WORDS: Final = "the cloud's own words"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One wish of the user, besides the machines themselves."""

    name: str
    recreate: dict[str, Any]
    update: str = "Refuse"
    deletion: str = "Delete"
    changed: bool = False
    """The spec asks for something else than the cloud resource was made with."""

    deleted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of the table: an object, and what is observed around it."""

    resource: QueuedResource
    observed: Observed


_KEPT: Final = {"onSuspended": "Keep", "onFailed": "Keep"}
WISHES: Final = (
    Wish(name="unchanged, made anew", recreate={}),
    Wish(name="unchanged, kept", recreate=_KEPT),
    Wish(name="unchanged, the budget is spent", recreate={"max": 0}),
    Wish(name="changed, refused, made anew", recreate={}, changed=True),
    Wish(name="changed, recreated, made anew", recreate={}, update="Recreate", changed=True),
    Wish(name="deleted", recreate={}, deleted=True),
    Wish(name="deleted and retained", recreate={}, deletion="Retain", deleted=True),
)


def _list_answers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield answers by name: what they change in an observation. `follows` is the verb of a known operation."""
    yield "no error", {}
    errors = {kind: CloudTPUError(kind, f"CODE_{kind.name}", WORDS) for kind in ErrorKind}
    for kind, error in errors.items():
        yield f"list: {kind}", {"listing": None, "error": error}
    for verb in (Verb.CREATE, Verb.DELETE):
        taken = Outcome(verb=verb, at=NOW - 1, operation="op-1")
        done = CloudOperationState(name=f"op-{verb}", done=True)
        yield f"{verb}: taken", {"outcome": taken}
        for kind, error in errors.items():
            yield f"{verb}: {kind}", {"outcome": replace(taken, operation="", error=error)}
            yield f"operation {verb}: {kind}", {"operation": replace(done, error=error), "follows": verb}


_ANSWERS: Final = dict(_list_answers())


def make_cell(situation: str, answer: str, wish: Wish) -> Cell:
    policies = {
        "recreate_policy": wish.recreate,
        "update_policy": wish.update,
        "deletion_policy": wish.deletion,
    }
    resource, clouds, nodes = SITUATIONS[situation](policies)
    if wish.changed and resource.status.operator.spec_hash:
        resource = noted(resource, spec_hash="of another spec")
    if wish.deleted:
        meta = resource.metadata.model_copy(update={"deletion_timestamp": int(NOW) - 10})
        resource = resource.model_copy(update={"metadata": meta})
    changes = dict(_ANSWERS[answer])
    verb = changes.pop("follows", None)
    if verb is not None:
        operation = CloudOperation(name=f"op-{verb}", verb=verb, start_time=int(NOW) - 30)
        resource = with_status(resource, operation=operation)
    members = tuple(
        make_member(f"{node.id}-w0", node.id, slice_id=node.id, ready=node.state == "READY")
        for node in nodes
        if node.state in {"READY", "PREEMPTED"}
        and node.labels == make_cloud_resource(resource, "").node["labels"]
    )
    observed = observe(*clouds, nodes=nodes, members=members, pods=(), listed_at=NOW - 1)
    observed = replace(observed, **changes)
    return Cell(resource=resource, observed=observed)
