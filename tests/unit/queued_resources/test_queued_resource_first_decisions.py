"""Test rules of first decisions, in every cell: each situation, answer of the cloud and wish of the user."""

from itertools import product

import pytest

from fake_cluster.queued_resources import NOW, SETTINGS, decide, find
from fake_cluster.resource_cells import (
    ANSWERS,
    SHAPES,
    WISHES,
    Cell,
    lay_out,
    requests_of,
)
from fake_cluster.resource_situations import SITUATIONS
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
from stepkeeper_operator.queued_resources.naming import UID_LABEL

REMOVALS = {
    "Suspended",
    "Failed",
    "Expired",
    "QuotaExhausted",
    "Preempted",
    "SpecChanged",
    "Vanished",
    "Deleted",
}
"""All reasons for which machines may be destroyed."""

ENDED = {"Suspended", "Failed", "Preempted", "Vanished"}
LONGEST_S = SETTINGS.refused_retry_s * 1.1

every_situation = pytest.mark.parametrize("situation", SITUATIONS)


def test_every_situation_answer_and_wish_meets_every_shape() -> None:
    met: dict[str, set[tuple[str, str]]] = {"situation": set(), "answer": set(), "wish": set()}
    for situation in SITUATIONS:
        for cell in lay_out(situation):
            met["situation"].add((situation, cell.shape))
            met["answer"].add((cell.answer, cell.shape))
            met["wish"].add((cell.wish.name, cell.shape))
    assert met["situation"] == set(product(SITUATIONS, SHAPES))
    assert met["answer"] == set(product(ANSWERS, SHAPES))
    assert met["wish"] == set(product((wish.name for wish in WISHES), SHAPES))


@every_situation
def test_a_first_decision_keeps_the_rules(situation: str) -> None:
    for cell in lay_out(situation):
        decision = decide(cell.resource, cell.observed)
        _check_ignorance(cell, decision)
        _check_creation(cell, decision)
        _check_deletion(cell, decision)
        _check_others(cell, decision)
        _check_next_look(cell, decision)


def _check_ignorance(cell: Cell, decision: Decision) -> None:
    """While nobody can tell what the cloud has, nothing is made, destroyed or let go of."""
    if cell.observed.listing is not None:
        return
    assert not requests_of(decision), cell.name
    rash = DeleteNode | EvictPod | LabelNodes
    assert not [action for action in decision.actions if isinstance(action, rash)], cell.name
    letting_go = SetFinalizer(present=False) in decision.actions
    assert not letting_go or cell.wish.deletion == "Retain" or cell.situation == "gone for good", cell.name
    before = cell.resource.status
    if not cell.wish.deleted:
        assert decision.status.nodes == before.nodes, cell.name
        assert decision.status.bookkeeping.removing == before.bookkeeping.removing, cell.name


def _check_creation(cell: Cell, decision: Decision) -> None:
    """There are never two, and none is asked for that nobody would remove."""
    for action in decision.actions:
        if not isinstance(action, CreateCloudResource):
            continue
        listing = cell.observed.listing
        assert listing is not None, cell.name
        assert not [r for r in listing.resources.values() if _is_ours(cell, r)], f"{cell.name}: a second one"
        assert not cell.wish.deleted, cell.name
        assert decision.status.operation is None, cell.name
        assert decision.write_status, f"{cell.name}: the status names it first"
        assert decision.status.bookkeeping.created, cell.name
        assert decision.status.bookkeeping.asked_at == int(NOW), cell.name
        assert decision.status.cloud_name.endswith(f"/{action.request.id}"), cell.name
        tier, count = cell.shape.split(", ")
        assert len(action.request.node_ids) == int(count), cell.name
        assert bool(action.request.node.get("autocheckpoint_enabled")) is (tier == "guaranteed"), cell.name
        assert action.request.api_version == ("v2" if tier == "spot" else "v2alpha1"), cell.name


def _check_deletion(cell: Cell, decision: Decision) -> None:
    """Nothing of ours is destroyed without a reason from the list, and nothing of others ever."""
    for action in decision.actions:
        if not isinstance(action, DeleteCloudResource):
            continue
        listing = cell.observed.listing
        assert listing is not None, cell.name
        found = listing.resources[action.cloud_id]
        assert _is_ours(cell, found), f"{cell.name}: somebody else's"
        assert found.state != "DELETING", cell.name
        removing = decision.status.bookkeeping.removing
        if cell.wish.deleted:
            assert cell.wish.deletion == "Delete", cell.name
        elif cell.situation == "a stray" and action.cloud_id == "team-v5e":
            assert find(decision, "Degraded").reason == "Stray" or removing, cell.name
        else:
            assert removing in REMOVALS - {"Deleted"}, cell.name
            _check_reason(cell, removing)
        for other in requests_of(decision):
            assert other is action, f"{cell.name}: quota is freed first"


def _check_reason(cell: Cell, removing: str) -> None:
    begun = cell.resource.status.bookkeeping.removing
    if removing == begun:
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
            _check_labels(cell, action)
    if cell.wish.deletion == "Retain" and cell.wish.deleted:
        assert decision.actions == (SetFinalizer(present=False),), cell.name
        assert not decision.write_status, cell.name


def _check_labels(cell: Cell, action: LabelNodes) -> None:
    """Labels are written on what the annotation names, and not for one that goes."""
    assert cell.situation in {"unlabelled, to be adopted", "of an earlier object, to be adopted"}, cell.name
    assert not cell.wish.deleted, cell.name
    assert action.labels[UID_LABEL] == cell.resource.metadata.uid, cell.name
    assert cell.observed.listing is not None
    for node_id, owner in action.owners.items():
        assert cell.observed.listing.nodes[node_id].labels.get(UID_LABEL, "") == owner, cell.name


def _check_next_look(cell: Cell, decision: Decision) -> None:
    """It is looked at again, and not too late; unless there is nothing more to see."""
    if any(isinstance(action, SetFinalizer) for action in decision.actions):
        return  # the watch tells of it
    if decision.requeue_after_s is None:
        assert decision.status.state is QueuedResourceState.GONE, f"{cell.name}: nobody looks again"
        assert find(decision, "Degraded").status == "True", cell.name
        return
    assert 0.05 <= decision.requeue_after_s <= LONGEST_S, f"{cell.name}: {decision.requeue_after_s}"


def _is_ours(cell: Cell, found: CloudQueuedResource) -> bool:
    return bool(found.node.get("labels", {}).get(UID_LABEL) == cell.resource.metadata.uid)
