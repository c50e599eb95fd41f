"""Test how cloud resources are deleted: in which order, after refusals, with an emptied status, and which are kept."""

from dataclasses import replace

import pytest

from fake_cluster.queued_resources import (
    CLUSTER_ID,
    NOW,
    SETTINGS,
    after,
    created,
    decide,
    deleting,
    find,
    kinds,
    make_cloud_resource,
    make_member,
    make_node,
    make_resource,
    noted,
    observe,
    with_status,
)
from fake_cluster.resource_cells import STATES
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    CloudOperation,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import (
    CloudOperationState,
    CloudQueuedResource,
    CloudTPUError,
    ErrorKind,
)
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.queued_resources.decision import (
    Cordon,
    Decision,
    DeleteCloudResource,
    DeleteNode,
    EvictPod,
    SetFinalizer,
)
from stepkeeper_operator.queued_resources.observed import MemberPod, Observed, Outcome, Verb
from stepkeeper_operator.queued_resources.subject import read_subject

MEMBER = make_member("host-0", "n0", slice_id="team-v5e", addresses=("10.0.0.0",))
POD = MemberPod(namespace="team", name="lm-w-0-0", uid="p0", node="host-0")
LETS_GO = (SetFinalizer(present=False),)
NO_CREDENTIALS = Observed(
    cluster_id=CLUSTER_ID,
    error=CloudTPUError(ErrorKind.CREDENTIALS, "UNAUTHENTICATED", "no credentials"),
    pods=(),
)
WAITS_S = [5, 10, 20, 40, 80, 160, 300, 300]


def test_a_deletion_drains_then_deletes_then_removes_nodes_then_lets_go() -> None:
    resource = deleting()
    cloud = make_cloud_resource(resource, "ACTIVE")
    node = make_node(cloud)
    first = decide(resource, observe(cloud, nodes=[node], members=(MEMBER,)))
    assert first.actions == (Cordon(member=MEMBER),)
    assert first.status.removing == "Deleted"
    resource, cordoned = after(resource, first), replace(MEMBER, unschedulable=True)
    draining = observe(cloud, nodes=[node], members=(cordoned,), pods=(POD,))
    assert decide(resource, draining).actions == (EvictPod(pod=POD),)
    stopping = replace(draining, pods=(replace(POD, stopping=True),))
    assert decide(resource, stopping).actions == ()
    silent = replace(draining, members=(replace(cordoned, ready=False),))
    for drained, late_s in ((stopping, SETTINGS.drain_s), (replace(draining, pods=()), 0), (silent, 0)):
        assert kinds(decide(resource, drained, now=NOW + late_s)) == [DeleteCloudResource]
    dying = decide(resource, observe(nodes=[replace(node, state="DELETING")], pods=()))
    assert dying.actions == ()
    assert "team-v5e" in find(dying, "Active").message
    gone = observe(members=(replace(cordoned, ready=False),), pods=())
    assert kinds(decide(resource, gone)) == [DeleteNode]
    assert decide(resource, observe(pods=())).actions == LETS_GO


def test_a_deletion_waits_for_a_creation_without_an_answer_or_an_end() -> None:
    resource = noted(deleting(QueuedResourceState.PENDING), asked_at=int(NOW - 10))
    assert decide(resource, observe(pods=())).actions == ()
    assert decide(resource, observe(pods=()), now=NOW + 80).actions == LETS_GO
    operation = CloudOperation(name="op", verb="Create", start_time=0)
    resource = noted(with_status(deleting(), operation=operation), removing="Deleted", removing_since=0)
    decision = decide(resource, observe(pods=()), now=60.0)
    assert (decision.actions, decision.status.operation) == ((), operation)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("known", [True, False], ids=["known", "with an emptied status"])
def test_a_deletion_in_every_state_deletes_or_waits(state: str, *, known: bool) -> None:
    resource = deleting(QueuedResourceState.CREATING) if known else make_resource(deleting=True)
    decision = decide(resource, observe(make_cloud_resource(resource, state), pods=()))
    assert kinds(decision) == ([] if state == "DELETING" else [DeleteCloudResource])
    assert decision.requeue_after_s is not None


@pytest.mark.parametrize(
    ("resource", "goes"),
    [
        (make_resource(QueuedResourceStatus(observed_generation=1), deleting=True), True),
        (noted(deleting(QueuedResourceState.GONE), created=False, number=1), True),
        (noted(deleting(QueuedResourceState.PENDING), created=False, number=1), False),
        (make_resource(deleting=True), False),
    ],
    ids=["it asked for nothing", "its resource is gone for good", "a creation failed", "its status is empty"],
)
def test_an_object_goes_without_the_cloud_if_nothing_can_be_left(
    resource: QueuedResource, *, goes: bool
) -> None:
    assert decide(resource, NO_CREDENTIALS).actions == (LETS_GO if goes else ())
    assert decide(resource, observe(pods=())).actions == LETS_GO
    made = make_cloud_resource(created(), "PROVISIONING")
    assert goes or kinds(decide(resource, observe(made, pods=()))) == [DeleteCloudResource]


def test_each_deletion_whose_operation_fails_is_followed_by_another_request_and_a_longer_wait() -> None:
    resource = noted(deleting(), removing="Deleted", removing_since=int(NOW))
    seen, now = observe(make_cloud_resource(resource, "ACTIVE"), pods=()), NOW
    ids, waits_s = [], []
    for index in range(5):
        asked = decide(resource, seen, now=now)
        ids += [a.request_id for a in asked.actions if isinstance(a, DeleteCloudResource)]
        accepted = Outcome(verb=Verb.DELETE, at=now, operation=f"op-{index}")
        running = decide(after(resource, asked), replace(seen, outcome=accepted), now=now)
        error = CloudTPUError(ErrorKind.TRANSIENT, "INTERNAL", "it broke")
        failed = CloudOperationState(name=f"op-{index}", done=True, error=error)
        told = decide(after(resource, running), replace(seen, operation=failed), now=now + 10)
        assert told.status.next_try_time is not None
        waits_s.append(told.status.next_try_time - (now + 10))
        resource, now = after(resource, told), float(told.status.next_try_time)
    assert len(set(ids)) == 5, "the API answers a request that it knows with the operation that has failed"
    assert waits_s == WAITS_S[:5]


Removed = tuple[QueuedResource, CloudQueuedResource]


def removals() -> dict[str, Removed]:
    changed = noted(created(QueuedResourceState.ACTIVE, update_policy="Recreate"), spec_hash="another")
    cases = {
        "deleted": (deleting(), "ACTIVE"),
        "suspended": (created(QueuedResourceState.ACTIVE), "SUSPENDED"),
        "changed": (changed, "ACTIVE"),
    }
    return {name: (each, make_cloud_resource(each, state)) for name, (each, state) in cases.items()}


every_removal = pytest.mark.parametrize("removed", removals().values(), ids=removals())


def refuse(
    resource: QueuedResource, cloud: CloudQueuedResource, kind: ErrorKind, now: float = NOW
) -> tuple[QueuedResource, Decision]:
    """Ask for the deletion, and be refused. Return the object as it is then, and what was decided last."""
    asked = decide(resource, observe(cloud, pods=()), now=now)
    assert kinds(asked) == [DeleteCloudResource]
    error = CloudTPUError(kind, "PERMISSION_DENIED", "the words")
    outcome = Outcome(verb=Verb.DELETE, at=now, error=error)
    told = decide(after(resource, asked), observe(cloud, pods=(), outcome=outcome), now=now)
    assert told.actions == ()
    return after(resource, told), told


@every_removal
@pytest.mark.parametrize("kind", ErrorKind)
def test_a_deletion_is_asked_for_again_within_five_minutes_however_it_fails(
    kind: ErrorKind, removed: Removed
) -> None:
    (resource, cloud), now = removed, NOW
    for wait_s in WAITS_S:
        resource, told = refuse(resource, cloud, kind, now)
        when = f"the next request is sent at {render_time(now + wait_s)}"
        assert when in find(told, "Active").message
        assert len([event for event in told.events if when in event.message]) == int(now == NOW), "once"
        resting = decide(resource, observe(cloud, pods=()), now=now + 1)
        assert (resting.actions, resting.write_status, resting.events) == ((), False, ())
        assert resting.requeue_after_s == wait_s - 1
        now += wait_s


@every_removal
@pytest.mark.parametrize("kind", [ErrorKind.TERMINAL, ErrorKind.NOT_FOUND, ErrorKind.CREDENTIALS])
def test_a_blocked_deletion_is_a_problem_until_it_is_accepted(kind: ErrorKind, removed: Removed) -> None:
    resource, told = refuse(*removed, kind)
    degraded = find(told, "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "DeletionBlocked")
    assert "PERMISSION_DENIED: the words" in degraded.message
    assert "costs money" in degraded.message
    # To retain it releases a deleted object's resource; a recreated one would be deleted all the same.
    assert ("Retain" in degraded.message) is (resource.metadata.deletion_timestamp is not None)
    accepted = Outcome(verb=Verb.DELETE, at=NOW + 5, operation="op")
    seen = observe(removed[1], pods=(), outcome=accepted)
    assert find(decide(resource, seen, now=NOW + 5), "Degraded").status == "False"


@every_removal
def test_a_list_that_is_refused_does_not_hide_why_a_deletion_is(removed: Removed) -> None:
    resource, told = refuse(*removed, ErrorKind.TERMINAL)
    lists = CloudTPUError(ErrorKind.TERMINAL, "PERMISSION_DENIED", "tpu.nodes.list denied")
    unlisted = Observed(cluster_id=CLUSTER_ID, error=lists, pods=(), listed_at=NOW)
    decision = decide(resource, unlisted, now=NOW + 1)
    assert decision.status.error == told.status.error
    assert find(decision, "Degraded").reason == "DeletionBlocked"
    assert decision.events == ()


@pytest.mark.parametrize("status", ["empty", "older"])
def test_a_lost_or_older_status_is_filled_from_what_is_ours_and_costs_no_machine(status: str) -> None:
    resource = make_resource() if status == "empty" else created(QueuedResourceState.ACTIVE)
    earlier, present = (make_cloud_resource(noted(created(), number=number), "ACTIVE") for number in (1, 3))
    listed = (present,) if status == "empty" else (earlier, present)
    taken = decide(resource, observe(*listed))
    assert taken.actions == ()
    assert taken.status.operator.number == 3
    settled = decide(after(resource, taken), observe(*listed, nodes=[make_node(present)]))
    deleted = [a.cloud_id for a in settled.actions if isinstance(a, DeleteCloudResource)]
    assert deleted == ([] if status == "empty" else [earlier.id])
    assert settled.status.state is QueuedResourceState.ACTIVE


@pytest.mark.parametrize("state", [QueuedResourceState.ACTIVE, QueuedResourceState.DELETING])
def test_what_an_older_status_was_removing_is_no_reason_to_remove_the_newest(
    state: QueuedResourceState,
) -> None:
    resource = noted(created(state), removing="Preempted", removing_since=int(NOW) - 5)
    theirs = make_cloud_resource(resource, "ACTIVE", node={"labels": {}})
    present = make_cloud_resource(noted(resource, number=3), "ACTIVE")
    taken = decide(resource, observe(theirs, present, nodes=[make_node(present)], pods=()))
    assert (taken.status.operator.number, taken.status.removal) == (3, None)
    assert decide(after(resource, taken), observe(theirs, present, nodes=[make_node(present)])).actions == ()


def test_nodes_of_an_earlier_one_are_removed_before_the_next_is_asked_for_and_living_ones_are_told() -> None:
    assert kinds(decide(noted(make_resource(), number=1), observe(members=(MEMBER,)))) == [DeleteNode]
    silent = replace(MEMBER, ready=False)
    assert kinds(decide(make_resource(), observe(members=(silent,)))) == [DeleteNode]
    unknown = decide(make_resource(), observe(members=(MEMBER,)))
    assert unknown.actions == ()
    assert unknown.requeue_after_s is not None
    assert "host-0" in find(unknown, "Active").message
    assert "stepkeeper.dev/queued-resource-uid" in find(unknown, "Active").message


def test_the_status_beside_a_spec_of_another_version_still_names_what_is_to_be_deleted() -> None:
    raw = created(QueuedResourceState.ACTIVE).to_raw()
    raw["spec"] |= {"deletionPolicy": "Retain", "slices": "Strange"}
    subject = read_subject(raw)
    assert subject.resource is None
    assert subject.retain
    assert subject.status.cloud_name.endswith("/team-v5e")
    assert subject.status.operator.created
