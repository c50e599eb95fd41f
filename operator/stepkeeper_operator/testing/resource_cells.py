"""Lay out truth tables of QueuedResources: every situation, every answer of the cloud, every wish of the user."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    CloudOperation,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import (
    CloudNode,
    CloudOperationState,
    CloudQueuedResource,
    CloudTPUError,
    ErrorKind,
)
from stepkeeper_operator.queued_resources.naming import make_cloud_id
from stepkeeper_operator.queued_resources.observed import Member, Observed, Outcome, Verb
from stepkeeper_operator.testing.queued_resources import (
    NOW,
    created,
    make_cloud_resource,
    make_node,
    make_resource,
    noted,
    observe,
)

__all__ = [
    "ANSWERS",
    "SHAPES",
    "SITUATIONS",
    "STATES",
    "WISHES",
    "WORDS",
    "Cell",
    "Wish",
    "lay_out",
    "make_cell",
]

WORDS: Final = "the cloud's own words"
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
_MISSED: Final = "missed once"
_LONG_AGO: Final = int(NOW) - 1000


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

    situation: str
    answer: str
    wish: Wish
    shape: str
    resource: QueuedResource
    observed: Observed

    @property
    def name(self) -> str:
        return f"{self.situation}; {self.answer}; {self.wish.name}; {self.shape}"


_Parts = tuple[QueuedResource, tuple[CloudQueuedResource, ...], tuple[CloudNode, ...]]
_Builder = Callable[[dict[str, Any]], _Parts]

_POLICIES: Final[dict[str, dict[str, Any]]] = {
    "made anew": {},
    "kept": {"onSuspended": "Keep", "onFailed": "Keep"},
    "the budget is spent": {"max": 0},
}
WISHES: Final = (
    *(
        Wish(name=f"{update}, {name}", recreate=recreate, update=policy, changed=changed)
        for (name, recreate), (update, policy, changed) in product(
            _POLICIES.items(),
            (
                ("unchanged", "Refuse", False),
                ("changed, refused", "Refuse", True),
                ("changed, recreated", "Recreate", True),
            ),
        )
    ),
    Wish(name="deleted", recreate={}, deleted=True),
    Wish(name="deleted, changed", recreate={"max": 0}, update="Recreate", changed=True, deleted=True),
    Wish(name="deleted and retained", recreate={}, deletion="Retain", deleted=True),
)
SHAPES: Final = {
    f"{tier}, {count}": {"tier": {tier: {}}, "node": {"count": count}}
    for tier, count in product(("guaranteed", "spot", "bestEffort"), (1, 3))
}


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


def _list_answers() -> dict[str, dict[str, Any]]:
    listed = {f"list: {kind}": {"listing": None, "error": _error(kind)} for kind in ErrorKind}
    return {"no error": {}, _MISSED: {"listing": None}, **listed}


def _error(kind: ErrorKind) -> CloudTPUError:
    return CloudTPUError(kind, f"CODE_{kind.name}", WORDS)


def _request_answers(verb: Verb) -> dict[str, dict[str, Any]]:
    taken = Outcome(verb=verb, cloud_id="", at=NOW - 1, operation="op-1")
    refused = {
        f"{verb}: {kind}": {"outcome": replace(taken, operation="", error=_error(kind))} for kind in ErrorKind
    }
    return {f"{verb}: taken": {"outcome": taken}, **refused}


def _operation_answers(verb: Verb) -> dict[str, dict[str, Any]]:
    running = CloudOperationState(name=f"op-{verb}", done=False)
    failed = {
        f"operation {verb}: {kind}": {"operation": replace(running, done=True, error=_error(kind))}
        for kind in ErrorKind
    }
    return {
        f"operation {verb}: runs": {"operation": running},
        f"operation {verb}: unread": {"operation": None, "follows": verb},
        f"operation {verb}: done": {"operation": replace(running, done=True)},
        **failed,
    }


ANSWERS: Final[dict[str, dict[str, Any]]] = {
    **_list_answers(),
    **_request_answers(Verb.CREATE),
    **_request_answers(Verb.DELETE),
    **_operation_answers(Verb.CREATE),
    **_operation_answers(Verb.DELETE),
}


def lay_out(situation: str) -> Iterator[Cell]:
    """Yield the cells of a situation: every answer with every wish, and the shapes of the machines in turn."""
    turns = count(list(SITUATIONS).index(situation))
    for wish, answer in product(WISHES, ANSWERS):
        if wish.deleted and answer == _MISSED:
            continue  # what is missing of one that goes is believed at once
        shape = list(SHAPES)[next(turns) % len(SHAPES)]
        yield make_cell(situation, answer, wish, shape)


def make_cell(situation: str, answer: str, wish: Wish, shape: str) -> Cell:
    """Make one cell."""
    policies = {
        "recreate_policy": wish.recreate,
        "update_policy": wish.update,
        "deletion_policy": wish.deletion,
    }
    resource, clouds, nodes = SITUATIONS[situation]({**SHAPES[shape], **policies})
    bookkeeping = resource.status.bookkeeping
    if wish.changed and bookkeeping.spec_hash:
        resource = noted(resource, spec_hash="of another spec")
    if wish.deleted:
        meta = resource.metadata.model_copy(update={"deletion_timestamp": int(NOW) - 10})
        resource = resource.model_copy(update={"metadata": meta})
    changes = dict(ANSWERS[answer])
    resource = _follow(resource, changes)
    members = tuple(
        Member(name=f"{node.id}-w0", uid=node.id, cloud_node=node.id, ready=node.state == "READY")
        for node in nodes
        if node.state in {"READY", "PREEMPTED"}
        and node.labels == make_cloud_resource(resource, "").node["labels"]
    )
    observed = observe(*clouds, nodes=nodes, members=members, pods=(), listed_at=NOW - 1)
    if "outcome" in changes:
        cloud_id = make_cloud_id("team", "v5e", bookkeeping.number)
        changes["outcome"] = replace(changes["outcome"], cloud_id=cloud_id)
    observed = replace(observed, **changes)
    return Cell(
        situation=situation, answer=answer, wish=wish, shape=shape, resource=resource, observed=observed
    )


def _follow(resource: QueuedResource, changes: dict[str, Any]) -> QueuedResource:
    """Let the status name the operation that the answer is about."""
    answer, verb = changes.get("operation"), changes.pop("follows", None)
    if answer is None and verb is None:
        return resource
    name = f"op-{verb}" if answer is None else answer.name
    operation = CloudOperation(name=name, verb=name.removeprefix("op-"), start_time=int(NOW) - 30)
    status: QueuedResourceStatus = resource.status.model_copy(update={"operation": operation})
    return resource.model_copy(update={"status": status})
