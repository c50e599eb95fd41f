"""Lay out truth tables of QueuedResources: every situation, every answer of the cloud, every wish of the user."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any, Final

from fake_cluster.queued_resources import (
    NOW,
    make_cloud_resource,
    noted,
    observe,
)
from fake_cluster.resource_situations import SITUATIONS

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    CloudOperation,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import (
    CloudOperationState,
    CloudTPUError,
    ErrorKind,
)
from stepkeeper_operator.queued_resources.decision import CreateCloudResource, Decision, DeleteCloudResource
from stepkeeper_operator.queued_resources.naming import make_cloud_id
from stepkeeper_operator.queued_resources.observed import Member, Observed, Outcome, Verb

__all__ = [
    "ANSWERS",
    "SHAPES",
    "WISHES",
    "WORDS",
    "Cell",
    "Wish",
    "lay_out",
    "make_cell",
    "requests_of",
]

WORDS: Final = "the cloud's own words"
_MISSED: Final = "missed once"


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


def requests_of(decision: Decision) -> list[CreateCloudResource | DeleteCloudResource]:
    """Return what a decision asks of the cloud."""
    return [a for a in decision.actions if isinstance(a, CreateCloudResource | DeleteCloudResource)]


def _follow(resource: QueuedResource, changes: dict[str, Any]) -> QueuedResource:
    """Let the status name the operation that the answer is about."""
    answer, verb = changes.get("operation"), changes.pop("follows", None)
    if answer is None and verb is None:
        return resource
    name = f"op-{verb}" if answer is None else answer.name
    operation = CloudOperation(name=name, verb=name.removeprefix("op-"), start_time=int(NOW) - 30)
    status: QueuedResourceStatus = resource.status.model_copy(update={"operation": operation})
    return resource.model_copy(update={"status": status})
