"""Test rules that hold in every cell: each situation with each answer of the cloud and each wish of the user."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fake_cluster.queued_resources import NOW, after, decide, list_cloud
from fake_cluster.resource_cells import (
    WORDS,
    Cell,
    lay_out,
    requests_of,
)
from fake_cluster.resource_situations import SITUATIONS
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource
from stepkeeper_operator.queued_resources.decision import (
    Cordon,
    CreateCloudResource,
    Decision,
    DeleteCloudResource,
    DeleteNode,
    EvictPod,
    LabelNodes,
    Relabel,
    SetFinalizer,
    Uncordon,
)
from stepkeeper_operator.queued_resources.naming import FINALIZER
from stepkeeper_operator.queued_resources.observed import Observed, Outcome, Verb

NOT_GONE = "its deletion is over, but the resource still exists"
MOST_ROUNDS = 8

every_situation = pytest.mark.parametrize("situation", SITUATIONS)


@every_situation
def test_what_was_decided_is_done_once_and_then_there_is_rest(situation: str) -> None:
    for cell in lay_out(situation):
        asked: set[tuple[type, str]] = set()
        told = ""
        for resource, observed, decision in _play(cell):
            new = [(type(action), _id_of(action)) for action in requests_of(decision)]
            assert not asked.intersection(new), f"{cell.name}: asked of the cloud twice"
            assert len(new) <= 1, f"{cell.name}: one request at a time"
            asked.update(new)
            assert decision.write_status or decision.status == resource.status, cell.name
            told += "".join(event.message for event in decision.events)
            if new:
                _check_crash(cell, resource, observed, decision)
        _check_words(cell, resource, told)


def _play(cell: Cell) -> Iterator[tuple[QueuedResource, Observed, Decision]]:
    """Decide and carry out at one moment, until there is nothing to do or the object is gone."""
    resource, observed = cell.resource, cell.observed
    for _ in range(MOST_ROUNDS):
        decision = decide(resource, observed)
        yield resource, observed, decision
        if SetFinalizer(present=False) in decision.actions or FINALIZER not in resource.metadata.finalizers:
            return
        if not decision.write_status and not decision.actions:
            return
        resource, observed = after(resource, decision), _carry_out(observed, decision)
    pytest.fail(f"{cell.name}: no rest after {MOST_ROUNDS} decisions: {decision.actions}")


def _carry_out(observed: Observed, decision: Decision) -> Observed:
    """Return what is observed once all actions are done, and the answer to a request of ours has come."""
    observed = replace(observed, outcome=None)
    for action in decision.actions:
        match action:
            case CreateCloudResource(request=request):
                made = CloudQueuedResource(
                    place=request.place,
                    id=request.id,
                    state="CREATING",
                    node_ids=request.node_ids,
                    node=request.node,
                )
                observed = _see(observed, made, Verb.CREATE)
            case DeleteCloudResource(cloud_id=cloud_id):
                assert observed.listing is not None
                dying = replace(observed.listing.resources[cloud_id], state="DELETING")
                observed = _see(observed, dying, Verb.DELETE)
            case LabelNodes():
                observed = _see_labels(observed, action)
            case Cordon(member=member):
                cordoned = replace(member, cordoned=True, cordoned_by_us=True)
                members = tuple(cordoned if m == member else m for m in observed.members)
                observed = replace(observed, members=members)
            case DeleteNode(member=member):
                observed = replace(
                    observed, members=tuple(m for m in observed.members if m.name != member.name)
                )
            case Uncordon() | Relabel() | EvictPod() | SetFinalizer():
                pytest.fail(f"no cell has anything for {action}")
    return observed


def _see(observed: Observed, changed: CloudQueuedResource, verb: Verb) -> Observed:
    assert observed.listing is not None
    resources = {**observed.listing.resources, changed.id: changed}
    listing = list_cloud(resources.values(), observed.listing.nodes.values())
    outcome = Outcome(verb=verb, at=NOW, operation=f"op-of-{changed.id}")
    return replace(observed, listing=listing, outcome=outcome)


def _see_labels(observed: Observed, action: LabelNodes) -> Observed:
    assert observed.listing is not None
    nodes = dict(observed.listing.nodes)
    for node_id in action.owners:
        nodes[node_id] = replace(nodes[node_id], labels={**nodes[node_id].labels, **action.labels})
    outcome = Outcome(verb=Verb.LABEL, at=NOW)
    return replace(observed, listing=replace(observed.listing, nodes=nodes), outcome=outcome)


def _check_words(cell: Cell, resource: QueuedResource, told: str) -> None:
    """At rest, each condition has a reason, and what the cloud said is told where people look."""
    status = resource.status
    conditions = {condition.type: condition for condition in status.conditions}
    assert len(conditions) == len(status.conditions), cell.name
    assert all(condition.reason[:1].isupper() for condition in conditions.values()), cell.name
    if status.error is None:
        return
    assert {"Active", "Degraded"} <= conditions.keys(), cell.name
    assert status.error.message in {WORDS, NOT_GONE}, cell.name
    assert status.error.message in told, f"{cell.name}: no event tells it"
    said = [condition for condition in conditions.values() if status.error.message in condition.message]
    passing = status.state is QueuedResourceState.DELETING or (
        cell.wish.deleted and status.error.verb == "Create"
    )
    assert said or passing, f"{cell.name}: no condition says it"


def _check_crash(cell: Cell, resource: QueuedResource, observed: Observed, decision: Decision) -> None:
    """Killed after the status was written and before the request was sent, the operator sends the same one."""
    again = decide(after(resource, decision), replace(observed, outcome=None))
    assert requests_of(again) == requests_of(decision), f"{cell.name}: another request after a restart"


def _id_of(action: CreateCloudResource | DeleteCloudResource) -> str:
    return action.request.id if isinstance(action, CreateCloudResource) else action.cloud_id
