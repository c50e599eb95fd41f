"""Test rules that hold in every cell: each situation with each answer of the cloud and each wish of the user."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fake_cluster.queued_resources import NOW, SETTINGS, after, decide, find, list_cloud
from fake_cluster.resource_cells import SITUATIONS, WORDS, Cell, lay_out, requests_of
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
    SetFinalizer,
)
from stepkeeper_operator.queued_resources.naming import FINALIZER, UID_LABEL
from stepkeeper_operator.queued_resources.observed import Observed, Outcome, Verb

NOT_GONE = "its deletion is over, but the resource still exists"
MOST_ROUNDS = 8
ENDED = {"Suspended", "Failed", "Preempted", "Vanished"}
REMOVALS = {*ENDED, "Expired", "QuotaExhausted", "SpecChanged"}
"""All reasons for which machines may be destroyed while somebody wants them."""

LETS_GO = SetFinalizer(present=False)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_first_decision_keeps_the_rules_and_is_carried_out_once(situation: str) -> None:
    for cell in lay_out(situation):
        resource, observed, decision = cell.resource, cell.observed, decide(cell.resource, cell.observed)
        for check in (_check_ignorance, _check_creation, _check_deletion, _check_others, _check_next_look):
            check(cell, decision)
        asked: set[tuple[type, str]] = set()
        told = ""
        for resource, observed, decision in _play(cell):
            new = [(type(action), _id_of(action)) for action in requests_of(decision)]
            assert not asked.intersection(new), f"{cell.name}: asked of the cloud twice"
            assert len(new) <= 1, f"{cell.name}: one request at a time, so that quota is freed first"
            asked.update(new)
            assert decision.write_status or decision.status == resource.status, cell.name
            told += "".join(event.message for event in decision.events)
            if new:
                _check_crash(cell, resource, observed, decision)
        _check_words(cell, resource, told)


def _check_ignorance(cell: Cell, decision: Decision) -> None:
    """While the operator can't know what the cloud has, nothing is made, destroyed or let go of."""
    if cell.observed.listing is not None:
        return
    rash = CreateCloudResource | DeleteCloudResource | DeleteNode | EvictPod | LabelNodes
    assert not [action for action in decision.actions if isinstance(action, rash)], cell.name
    keeps_nothing = cell.wish.deletion == "Retain" or cell.situation == "gone for good"
    assert LETS_GO not in decision.actions or keeps_nothing, cell.name
    before = cell.resource.status
    if not cell.wish.deleted:
        assert decision.status.nodes == before.nodes, cell.name
        assert decision.status.bookkeeping.removing == before.bookkeeping.removing, cell.name


def _check_creation(cell: Cell, decision: Decision) -> None:
    """There are never two, and the status names it first."""
    for action in (a for a in decision.actions if isinstance(a, CreateCloudResource)):
        assert not [r for r in _listed(cell).values() if _is_ours(cell, r)], f"{cell.name}: a second one"
        assert not cell.wish.deleted, cell.name
        assert decision.status.operation is None, cell.name
        assert decision.write_status, cell.name
        assert decision.status.bookkeeping.created, cell.name
        assert decision.status.bookkeeping.asked_at == int(NOW), cell.name
        assert decision.status.cloud_name.endswith(f"/{action.request.id}"), cell.name
        tier, count = cell.shape.split(", ")
        assert len(action.request.node_ids) == int(count), cell.name
        assert bool(action.request.node.get("autocheckpoint_enabled")) is (tier == "guaranteed"), cell.name
        assert action.request.api_version == ("v2" if tier == "spot" else "v2alpha1"), cell.name


def _check_deletion(cell: Cell, decision: Decision) -> None:
    """Nothing of ours is destroyed without a reason from the list, and nothing of others ever."""
    for action in (a for a in decision.actions if isinstance(a, DeleteCloudResource)):
        found = _listed(cell)[action.cloud_id]
        assert _is_ours(cell, found), f"{cell.name}: somebody else's"
        assert found.state != "DELETING", cell.name
        removing = decision.status.bookkeeping.removing
        if cell.wish.deleted:
            assert cell.wish.deletion == "Delete", cell.name
        elif cell.situation == "a stray" and action.cloud_id == "team-v5e":
            assert find(decision, "Degraded").reason == "Stray" or removing, cell.name
        else:
            assert removing in REMOVALS, cell.name
            _check_reason(cell, removing)


def _check_reason(cell: Cell, removing: str) -> None:
    if removing == cell.resource.status.bookkeeping.removing:
        return
    if removing == "SpecChanged":
        assert cell.wish.changed, cell.name
        assert cell.wish.update == "Recreate", cell.name
    if removing in ENDED:
        assert not cell.wish.recreate, f"{cell.name}: it is to be kept"
        ends = {"SUSPENDED", "FAILED", "active, preempted", "active, terminated", "active, without nodes"}
        assert cell.situation in ends, cell.name


def _check_others(cell: Cell, decision: Decision) -> None:
    """The machines of somebody else, and those that somebody keeps, stay as they are."""
    mine = {member.name for member in cell.observed.members}
    for action in decision.actions:
        if isinstance(action, Cordon | DeleteNode):
            assert action.member.name in mine, cell.name
            assert cell.wish.deleted or decision.status.bookkeeping.removing, cell.name
        if isinstance(action, LabelNodes):
            adopting = {"unlabelled, to be adopted", "of an earlier object, to be adopted"}
            assert cell.situation in adopting, cell.name
            assert not cell.wish.deleted, cell.name
            assert action.labels[UID_LABEL] == cell.resource.metadata.uid, cell.name
            assert cell.observed.listing is not None
            for node_id, owner in action.owners.items():
                assert cell.observed.listing.nodes[node_id].labels.get(UID_LABEL, "") == owner, cell.name
    if cell.wish.deletion == "Retain" and cell.wish.deleted:
        assert (decision.actions, decision.write_status) == ((LETS_GO,), False), cell.name


def _check_next_look(cell: Cell, decision: Decision) -> None:
    """It is looked at again, and not too late; unless there is nothing more to see, or the watch tells of it."""
    if any(isinstance(action, SetFinalizer) for action in decision.actions):
        return
    if decision.requeue_after_s is None:
        assert decision.status.state is QueuedResourceState.GONE, f"{cell.name}: no look comes any more"
        assert find(decision, "Degraded").status == "True", cell.name
        return
    assert 0.05 <= decision.requeue_after_s <= SETTINGS.refused_retry_s * 1.1, cell.name


def _play(cell: Cell) -> Iterator[tuple[QueuedResource, Observed, Decision]]:
    """Decide and carry out at one moment, until there is nothing to do or the object is gone."""
    resource, observed = cell.resource, cell.observed
    for _ in range(MOST_ROUNDS):
        decision = decide(resource, observed)
        yield resource, observed, decision
        if LETS_GO in decision.actions or FINALIZER not in resource.metadata.finalizers:
            return
        if not decision.write_status and not decision.actions:
            return
        resource, observed = after(resource, decision), _carry_out(observed, decision)
    pytest.fail(f"{cell.name}: no rest after {MOST_ROUNDS} decisions: {decision.actions}")


def _carry_out(observed: Observed, decision: Decision) -> Observed:
    """Return what is observed once all actions are done, and the answer to a request of ours has come."""
    observed = replace(observed, outcome=None)
    for action in decision.actions:
        listing = observed.listing
        match action:
            case CreateCloudResource(request=asked):
                made = CloudQueuedResource(
                    place=asked.place, id=asked.id, state="CREATING", node_ids=asked.node_ids, node=asked.node
                )
                observed = _see(observed, made, Verb.CREATE)
            case DeleteCloudResource(cloud_id=cloud_id):
                assert listing is not None
                dying = replace(listing.resources[cloud_id], state="DELETING")
                observed = _see(observed, dying, Verb.DELETE)
            case LabelNodes(owners=owners, labels=labels):
                assert listing is not None
                nodes = dict(listing.nodes)
                for node_id in owners:
                    nodes[node_id] = replace(nodes[node_id], labels={**nodes[node_id].labels, **labels})
                outcome = Outcome(verb=Verb.LABEL, at=NOW)
                observed = replace(observed, listing=replace(listing, nodes=nodes), outcome=outcome)
            case Cordon(member=member):
                cordoned = replace(member, cordoned=True, cordoned_by_us=True)
                members = tuple(cordoned if m == member else m for m in observed.members)
                observed = replace(observed, members=members)
            case DeleteNode(member=member):
                left = tuple(m for m in observed.members if m.name != member.name)
                observed = replace(observed, members=left)
            case _:
                pytest.fail(f"no cell has anything for {action}")
    return observed


def _see(observed: Observed, changed: CloudQueuedResource, verb: Verb) -> Observed:
    assert observed.listing is not None
    resources = {**observed.listing.resources, changed.id: changed}
    listing = list_cloud(resources.values(), observed.listing.nodes.values())
    outcome = Outcome(verb=verb, at=NOW, operation=f"op-of-{changed.id}")
    return replace(observed, listing=listing, outcome=outcome)


def _check_words(cell: Cell, resource: QueuedResource, told: str) -> None:
    """At rest, each condition has a reason, and what the cloud said is where people look."""
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


def _listed(cell: Cell) -> dict[str, CloudQueuedResource]:
    assert cell.observed.listing is not None, f"{cell.name}: a request without knowing what there is"
    return dict(cell.observed.listing.resources)


def _is_ours(cell: Cell, found: CloudQueuedResource) -> bool:
    return bool(found.node.get("labels", {}).get(UID_LABEL) == cell.resource.metadata.uid)


def _id_of(action: CreateCloudResource | DeleteCloudResource) -> str:
    return action.request.id if isinstance(action, CreateCloudResource) else action.cloud_id
