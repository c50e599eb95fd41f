"""Test the deletion of a QueuedResource in every state, and with an emptied or unreadable status."""

from dataclasses import replace

import pytest

from fake_cluster.queued_resources import (
    NOW,
    SETTINGS,
    after,
    created,
    decide,
    deleting,
    find,
    kinds,
    make_cloud_resource,
    make_node,
    make_resource,
    noted,
    observe,
    with_status,
)
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    CloudOperation,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudOperationState, CloudTPUError, ErrorKind
from stepkeeper_operator.queued_resources.decision import (
    Cordon,
    DeleteCloudResource,
    DeleteNode,
    EvictPod,
    SetFinalizer,
)
from stepkeeper_operator.queued_resources.observed import Member, MemberPod, Observed, Outcome, Verb
from stepkeeper_operator.queued_resources.subject import read_subject

STATES = (
    "CREATING",
    "ACCEPTED",
    "WAITING_FOR_RESOURCES",
    "PROVISIONING",
    "ACTIVE",
    "SUSPENDING",
    "SUSPENDED",
    "FAILED",
    "DELETING",
    "SOMETHING_NEW",
)


MEMBER = Member(name="host-0", uid="n0", cloud_node="team-v5e", addresses=("10.0.0.0",))


POD = MemberPod(namespace="team", name="lm-w-0-0", uid="p0", node="host-0")


def test_somebody_elses_deletion_is_seen_and_it_is_made_anew() -> None:
    resource = created(QueuedResourceState.ACTIVE)
    decision = decide(resource, observe())
    assert decision.status.bookkeeping.number == 1
    assert decision.actions == ()
    assert "Vanished" in {event.reason for event in decision.events}


def test_a_deletion_drains_then_deletes_then_removes_nodes_then_lets_go() -> None:
    resource = deleting()
    cloud = make_cloud_resource(resource, "ACTIVE")
    node = make_node(cloud)
    first = decide(resource, observe(cloud, nodes=[node], members=(MEMBER,)))
    assert first.actions == (Cordon(member=MEMBER),)
    assert first.status.bookkeeping.removing == "Deleted"
    resource, cordoned = after(resource, first), replace(MEMBER, cordoned=True)
    draining = observe(cloud, nodes=[node], members=(cordoned,), pods=(POD,))
    assert decide(resource, draining).actions == (EvictPod(pod=POD),)
    stopping = replace(draining, pods=(replace(POD, stopping=True),))
    assert decide(resource, stopping).actions == ()
    late = decide(resource, stopping, now=NOW + SETTINGS.drain_s)
    assert kinds(late) == [DeleteCloudResource]
    drained = decide(resource, replace(draining, pods=()))
    assert kinds(drained) == [DeleteCloudResource]
    gone = observe(members=(replace(cordoned, ready=False),), pods=())
    assert kinds(decide(resource, gone)) == [DeleteNode]
    assert decide(resource, observe(pods=())).actions == (SetFinalizer(present=False),)


def test_pods_on_silent_nodes_hold_nothing_up() -> None:
    resource = noted(deleting(), removing="Deleted", removing_since=int(NOW))
    cloud = make_cloud_resource(resource, "SUSPENDED")
    silent = replace(MEMBER, ready=False, cordoned=True)
    assert kinds(decide(resource, observe(cloud, members=(silent,), pods=(POD,)))) == [DeleteCloudResource]


def test_a_deletion_waits_for_the_clouds_last_node() -> None:
    resource = noted(deleting(), removing="Deleted", removing_since=int(NOW))
    node = make_node(make_cloud_resource(resource, "ACTIVE"), state="DELETING")
    decision = decide(resource, observe(nodes=[node], pods=()))
    assert decision.actions == ()
    assert "team-v5e" in find(decision, "Active").message


def test_a_deletion_waits_for_a_creation_without_an_answer() -> None:
    resource = noted(deleting(QueuedResourceState.PENDING), asked_at=int(NOW - 10))
    assert decide(resource, observe(pods=())).actions == ()
    assert decide(resource, observe(pods=()), now=NOW + 80).actions == (SetFinalizer(present=False),)


@pytest.mark.parametrize("state", STATES)
def test_a_deletion_in_every_state_deletes_or_waits(state: str) -> None:
    resource = deleting(QueuedResourceState.CREATING)
    decision = decide(resource, observe(make_cloud_resource(resource, state), pods=()))
    assert kinds(decision) == ([] if state == "DELETING" else [DeleteCloudResource])
    assert decision.requeue_after_s is not None


def test_a_retained_resource_stays_with_its_nodes() -> None:
    resource = deleting(deletion_policy="Retain")
    cloud = make_cloud_resource(resource, "ACTIVE")
    decision = decide(resource, observe(cloud, members=(MEMBER,)))
    assert decision.actions == (SetFinalizer(present=False),)
    assert decision.events[0].reason == "Retained"


def test_a_deletion_without_credentials_says_what_to_do() -> None:
    error = CloudTPUError(ErrorKind.CREDENTIALS, "UNAUTHENTICATED", "no credentials")
    blind = Observed(cluster_id="cluster-uid", error=error, pods=())
    decision = decide(deleting(), blind)
    degraded = find(decision, "Degraded")
    assert degraded.reason == "DeletionBlocked"
    assert "Retain" in degraded.message
    assert not decide(after(deleting(), decision), blind).write_status


def test_an_object_that_never_asked_for_anything_goes_without_the_cloud() -> None:
    error = CloudTPUError(ErrorKind.CREDENTIALS, "UNAUTHENTICATED", "no credentials")
    resource = make_resource(QueuedResourceStatus(observed_generation=1), deleting=True)
    decision = decide(resource, Observed(cluster_id="cluster-uid", error=error))
    assert decision.actions == (SetFinalizer(present=False),)


@pytest.mark.parametrize("state", [QueuedResourceState.GONE, QueuedResourceState.PENDING])
def test_an_object_whose_cloud_resource_was_removed_for_good_goes_without_the_cloud(
    state: QueuedResourceState,
) -> None:
    error = CloudTPUError(ErrorKind.CREDENTIALS, "UNAUTHENTICATED", "no credentials")
    resource = noted(deleting(state), created=False, number=1)
    decision = decide(resource, Observed(cluster_id="cluster-uid", error=error))
    released = decision.actions == (SetFinalizer(present=False),)
    assert released is (state is QueuedResourceState.GONE), "after a failed creation nobody knows"


def test_a_deletion_with_an_emptied_status_looks_first() -> None:
    resource = make_resource(deleting=True)
    error = CloudTPUError(ErrorKind.TRANSIENT, "UNAVAILABLE", "down")
    blind = decide(resource, Observed(cluster_id="cluster-uid", error=error))
    assert blind.actions == ()
    assert blind.requeue_after_s is not None
    found = decide(resource, observe(make_cloud_resource(resource, "ACTIVE"), pods=()))
    assert kinds(found) == [DeleteCloudResource]
    assert decide(resource, observe()).actions == (SetFinalizer(present=False),)


def test_a_deletion_that_ended_without_effect_is_asked_for_again_with_another_id() -> None:
    operation = CloudOperation(name="op", verb="Delete", start_time=int(NOW))
    resource = noted(
        with_status(deleting(), operation=operation), removing="Deleted", removing_since=int(NOW)
    )
    cloud = make_cloud_resource(resource, "ACTIVE")
    before = decide(with_status(resource, operation=None), observe(cloud, pods=()))
    done = CloudOperationState(name="op", done=True)
    told = decide(resource, observe(cloud, pods=(), operation=done))
    assert told.actions == ()
    again = decide(after(resource, told), observe(cloud, pods=()), now=NOW + 5)
    ids = {a.request_id for d in (before, again) for a in d.actions if isinstance(a, DeleteCloudResource)}
    assert len(ids) == 2


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
        assert told.status.bookkeeping.not_before is not None
        waits_s.append(told.status.bookkeeping.not_before - (now + 10))
        resource, now = after(resource, told), float(told.status.bookkeeping.not_before)
    assert len(set(ids)) == 5, "the API answers a request that it knows with the operation that has failed"
    assert waits_s == [5, 10, 20, 40, 80]


def test_an_emptied_status_is_filled_from_what_is_ours() -> None:
    resource = make_resource()
    third = make_cloud_resource(noted(created(), number=3), "ACTIVE")
    taken = decide(resource, observe(third))
    assert taken.actions == ()
    assert taken.status.bookkeeping.number == 3
    settled = decide(after(resource, taken), observe(third, nodes=[make_node(third)]))
    assert settled.status.state is QueuedResourceState.ACTIVE


def test_a_status_that_is_older_than_the_cloud_costs_no_machine() -> None:
    restored = created(QueuedResourceState.ACTIVE)
    late = make_cloud_resource(noted(created(), number=1), "ACTIVE")
    present = make_cloud_resource(noted(created(), number=3), "ACTIVE")
    taken = decide(restored, observe(late, present))
    assert taken.actions == ()
    assert taken.status.bookkeeping.number == 3
    settled = decide(after(restored, taken), observe(late, present, nodes=[make_node(present)]))
    assert [a.cloud_id for a in settled.actions if isinstance(a, DeleteCloudResource)] == [late.id]
    assert settled.status.state is QueuedResourceState.ACTIVE


def test_nodes_of_an_earlier_one_are_removed_before_the_next_is_asked_for() -> None:
    assert kinds(decide(noted(make_resource(), number=1), observe(members=(MEMBER,)))) == [DeleteNode]
    silent = replace(MEMBER, ready=False)
    assert kinds(decide(make_resource(), observe(members=(silent,)))) == [DeleteNode]


def test_a_living_node_that_no_machine_is_known_of_is_told_and_left_alone() -> None:
    resource = make_resource()
    decision = decide(resource, observe(members=(MEMBER,)))
    assert decision.actions == ()
    assert decision.requeue_after_s is not None
    assert "host-0" in find(decision, "Active").message
    assert "stepkeeper.dev/queued-resource-uid" in find(decision, "Active").message


def test_the_status_beside_a_spec_of_another_version_still_names_what_is_to_be_deleted() -> None:
    raw = created(QueuedResourceState.ACTIVE).to_raw()
    raw["spec"]["deletionPolicy"] = "Retain"
    raw["spec"]["node"] = "Strange"
    subject = read_subject(raw)
    assert subject.resource is None
    assert subject.retain
    assert subject.status.cloud_name.endswith("/team-v5e")
    assert subject.status.bookkeeping.created
