"""Test the decisions about a QueuedResource in every state of the cloud resource, under every policy."""

from typing import Any

import pytest

from fake_cluster.queued_resources import (
    NOW,
    after,
    created,
    decide,
    find,
    kinds,
    make_cloud_resource,
    make_node,
    make_resource,
    noted,
    observe,
)
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudTPUError, ErrorKind
from stepkeeper_operator.queued_resources.decision import (
    CreateCloudResource,
    DeleteCloudResource,
    SetFinalizer,
)
from stepkeeper_operator.queued_resources.observed import Observed

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


def test_nothing_is_asked_of_the_cloud_before_the_finalizer_is_seen() -> None:
    decision = decide(make_resource(finalizers=()), observe())
    assert decision.actions == (SetFinalizer(present=True),)
    assert not decision.write_status
    lost = created(QueuedResourceState.ACTIVE, finalizers=())
    assert decide(lost, observe(make_cloud_resource(lost, "SUSPENDED"))).actions == decision.actions


def test_an_object_that_can_ask_for_nothing_needs_no_finalizer() -> None:
    error = CloudTPUError(ErrorKind.CREDENTIALS, "UNAUTHENTICATED", "no credentials")
    decision = decide(make_resource(finalizers=()), Observed(cluster_id="cluster-uid", error=error))
    assert decision.actions == ()
    assert find(decision, "Accepted").reason == "NoCredentials"


def test_the_status_names_the_resource_before_it_is_created() -> None:
    decision = decide(make_resource(), observe())
    assert kinds(decision) == [CreateCloudResource]
    assert decision.write_status
    assert decision.status.bookkeeping.created
    assert (
        decision.status.cloud_name == "projects/my-project/locations/us-central2-b/queuedResources/team-v5e"
    )
    assert decision.status.bookkeeping.asked_at == int(NOW)


def test_an_operator_that_was_killed_after_the_status_asks_again_with_the_same_ids() -> None:
    first = decide(make_resource(), observe())
    again = decide(after(make_resource(), first), observe(), now=NOW + 60)
    assert kinds(again) == [CreateCloudResource]
    before, now = first.actions[0], again.actions[0]
    assert isinstance(before, CreateCloudResource)
    assert isinstance(now, CreateCloudResource)
    assert before.request == now.request


def test_without_a_listing_nothing_is_created_or_deleted() -> None:
    error = CloudTPUError(ErrorKind.TRANSIENT, "UNAVAILABLE", "down")
    blind = Observed(cluster_id="cluster-uid", error=error, listed_at=NOW)
    for resource in (make_resource(), created(QueuedResourceState.ACTIVE), created()):
        decision = decide(resource, blind)
        assert decision.actions == ()
        assert decision.requeue_after_s is not None


@pytest.mark.parametrize("state", STATES)
def test_a_resource_of_ours_is_looked_at_again(state: str) -> None:
    resource = created(QueuedResourceState.CREATING)
    cloud = make_cloud_resource(resource, state)
    decision = decide(resource, observe(cloud, nodes=[make_node(cloud)]))
    assert decision.requeue_after_s is not None
    assert CreateCloudResource not in kinds(decision)
    assert (DeleteCloudResource in kinds(decision)) is (state in {"SUSPENDED", "FAILED"})


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("wish", ["nothing", "deletion", "retention"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_decision_that_was_applied_is_not_made_again(state: str, wish: str, *, known: bool) -> None:
    policy = "Retain" if wish == "retention" else "Delete"
    resource = created(QueuedResourceState.CREATING, deletion_policy=policy)
    cloud = make_cloud_resource(resource, state)
    if not known:
        resource = make_resource(deletion_policy=policy)
    if wish != "nothing":
        meta = resource.metadata.model_copy(update={"deletion_timestamp": 1})
        resource = resource.model_copy(update={"metadata": meta})
    observed = observe(cloud, nodes=[make_node(cloud)], pods=())
    first = decide(resource, observed)
    second = decide(after(resource, first), observed)
    if first.actions and not isinstance(first.actions[0], SetFinalizer):
        return  # it changes the cloud: the story goes on in the property tests
    settled = decide(after(resource, second), observed)
    assert not settled.write_status
    assert settled.status == second.status


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("presence", ["foreign", "of another object", "unlabelled"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "not asked for"])
@pytest.mark.parametrize("deleting", [True, False], ids=["deleting", "wanted"])
def test_what_is_not_ours_is_never_touched(state: str, presence: str, *, asked: bool, deleting: bool) -> None:
    resource = created() if asked else make_resource()
    labels = {
        "foreign": {"stepkeeper-cluster": "other", "stepkeeper-uid": "uid-9"},
        "of another object": {"stepkeeper-cluster": "cluster-uid", "stepkeeper-uid": "uid-2"},
        "unlabelled": {},
    }[presence]
    node = {"accelerator_type": "v5litepod-16", "runtime_version": "x", "labels": labels}
    cloud = make_cloud_resource(resource, state, node=node)
    if deleting:
        meta = resource.metadata.model_copy(update={"deletion_timestamp": 1})
        resource = resource.model_copy(update={"metadata": meta})
    decision = decide(resource, observe(cloud, nodes=[make_node(cloud)]))
    if deleting:
        assert decision.actions == (SetFinalizer(present=False),)
        return
    assert decision.actions == ()
    accepted = find(decision, "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "NotOurs")


@pytest.mark.parametrize(
    ("state", "policy", "removed"),
    [
        ("SUSPENDED", {}, True),
        ("SUSPENDED", {"onSuspended": "Keep"}, False),
        ("SUSPENDED", {"onFailed": "Keep"}, True),
        ("FAILED", {}, True),
        ("FAILED", {"onFailed": "Keep"}, False),
        ("FAILED", {"onSuspended": "Keep"}, True),
        ("FAILED", {"max": 2}, True),
        ("FAILED", {"max": 1}, False),
    ],
)
def test_the_recreate_policy_says_what_happens_at_an_end(
    state: str, policy: dict[str, Any], *, removed: bool
) -> None:
    resource = noted(created(QueuedResourceState.ACTIVE, recreate_policy=policy), streak=1)
    decision = decide(resource, observe(make_cloud_resource(resource, state)))
    assert kinds(decision) == ([DeleteCloudResource] if removed else [])
    assert bool(decision.status.bookkeeping.removing) is removed
    assert (find(decision, "Degraded").status == "True") is not removed


NODE_ENDS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("PREEMPTED", {}, "Preempted", "AsExpected"),
    ("TERMINATED", {}, "Preempted", "AsExpected"),
    ("STOPPED", {}, "Preempted", "AsExpected"),
    ("STOPPED", {"tier": {"bestEffort": {}}}, "Preempted", "AsExpected"),
    ("STOPPED", {"tier": {"guaranteed": {}}}, "", "NodeNotReady"),
    ("STOPPED", {"recreate_policy": {"onSuspended": "Keep"}}, "", "Preempted"),
    ("STOPPING", {}, "", "NodeNotReady"),
)


@pytest.mark.parametrize(("state", "spec", "removing", "degraded"), NODE_ENDS)
def test_a_node_that_does_not_come_back_ends_an_active_resource(
    state: str, spec: dict[str, Any], removing: str, degraded: str
) -> None:
    resource = created(QueuedResourceState.ACTIVE, **spec)
    cloud = make_cloud_resource(resource, "ACTIVE")
    decision = decide(resource, observe(cloud, nodes=[make_node(cloud, state=state)]))
    assert decision.status.bookkeeping.removing == removing
    assert find(decision, "Degraded").reason == degraded
    assert [event.reason for event in decision.events].count("Preempted") == int(degraded != "NodeNotReady")


def test_a_node_that_is_missing_for_long_ends_it() -> None:
    resource = noted(created(QueuedResourceState.ACTIVE), active_since=int(NOW - 119))
    cloud = make_cloud_resource(resource, "ACTIVE")
    assert not decide(resource, observe(cloud)).status.bookkeeping.removing
    assert decide(resource, observe(cloud), now=NOW + 2).status.bookkeeping.removing == "Preempted"


def test_the_next_one_is_asked_for_after_the_old_one_is_gone_and_after_the_back_off() -> None:
    resource = noted(
        created(QueuedResourceState.SUSPENDED), removing="Suspended", removing_since=9000, streak=2
    )
    cloud = make_cloud_resource(resource, "DELETING")
    waiting = decide(resource, observe(cloud, pods=()))
    assert waiting.actions == ()
    gone = decide(resource, observe(pods=()))
    book = gone.status.bookkeeping
    assert (book.number, book.created, book.streak, book.removing) == (1, False, 3, "")
    assert book.not_before == int(NOW + 120)
    assert gone.status.state is QueuedResourceState.PENDING
    assert gone.status.recreations == 1
    early = decide(after(resource, gone), observe(), now=NOW + 119)
    assert early.actions == ()
    due = decide(after(resource, gone), observe(), now=NOW + 120)
    assert kinds(due) == [CreateCloudResource]
    assert due.status.cloud_name.endswith("/team-v5e-r1")


def test_an_hour_of_being_active_refills_the_budget() -> None:
    resource = noted(
        created(QueuedResourceState.ACTIVE, recreate_policy={"max": 3}),
        streak=2,
        active_since=int(NOW - 3600),
    )
    cloud = make_cloud_resource(resource, "SUSPENDED")
    assert decide(resource, observe(cloud)).status.bookkeeping.streak == 0


def test_an_expired_request_is_removed_and_stays_gone_if_the_policy_says_so() -> None:
    resource = created(
        QueuedResourceState.WAITING, queueing={"validUntilSeconds": 60}, recreate_policy={"onFailed": "Keep"}
    )
    cloud = make_cloud_resource(resource, "FAILED")
    decision = decide(resource, observe(cloud))
    assert decision.status.bookkeeping.removing == "Expired"
    gone = decide(after(resource, decision), observe(pods=()), now=NOW + 60)
    assert gone.status.state is QueuedResourceState.GONE
    resource = after(resource, gone)
    assert decide(resource, observe(), now=NOW + 90_000).actions == ()
    changed = resource.model_copy(update={"spec": resource.spec.model_copy(update={"queueing": None})})
    assert kinds(decide(changed, observe(), now=NOW + 90_000)) == [CreateCloudResource]


def test_what_fails_after_its_machines_came_has_not_run_out() -> None:
    resource = created(
        QueuedResourceState.ACTIVE, queueing={"validUntilSeconds": 60}, recreate_policy={"onFailed": "Keep"}
    )
    resource = noted(resource, active_since=2000)
    cloud = make_cloud_resource(resource, "FAILED", error_code="INTERNAL", error_message="the host died")
    decision = decide(resource, observe(cloud))
    assert not decision.status.bookkeeping.removing
    degraded = find(decision, "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "Failed")
    assert "the host died" in degraded.message


def test_what_had_failed_and_was_kept_stays_when_its_time_is_over() -> None:
    resource = created(
        QueuedResourceState.CREATING, queueing={"validUntilSeconds": 60}, recreate_policy={"onFailed": "Keep"}
    )
    cloud = make_cloud_resource(resource, "FAILED", create_time=int(NOW), error_code="INTERNAL")
    resource = after(resource, decide(resource, observe(cloud)))
    assert not decide(resource, observe(cloud), now=NOW + 90).status.bookkeeping.removing
    expired = make_cloud_resource(resource, "FAILED", create_time=int(NOW), error_code="DEADLINE_EXCEEDED")
    assert decide(resource, observe(expired), now=NOW + 90).status.bookkeeping.removing == "Expired"


def test_an_expired_request_that_the_cloud_leaves_waiting_is_removed() -> None:
    resource = created(QueuedResourceState.WAITING, queueing={"validUntilSeconds": 60})
    cloud = make_cloud_resource(resource, "WAITING_FOR_RESOURCES", create_time=int(NOW) - 100)
    assert not decide(resource, observe(cloud)).status.bookkeeping.removing
    assert decide(resource, observe(cloud), now=NOW + 21).status.bookkeeping.removing == "Expired"


def test_a_request_whose_interval_is_over_is_removed() -> None:
    interval = {"startTime": "1970-01-01T02:00:00Z", "endTime": "1970-01-01T03:00:00Z"}
    resource = created(QueuedResourceState.WAITING, queueing={"validInterval": interval})
    cloud = make_cloud_resource(resource, "WAITING_FOR_RESOURCES", create_time=int(NOW))
    assert not decide(resource, observe(cloud)).status.bookkeeping.removing
    assert decide(resource, observe(cloud), now=NOW + 860).status.bookkeeping.removing == "Expired"


def test_a_later_number_that_somebody_has_taken_is_passed_over() -> None:
    resource = noted(make_resource(QueuedResourceStatus(observed_generation=1)), number=2)
    foreign = make_cloud_resource(resource, "ACTIVE", node={"labels": {"stepkeeper-uid": "x"}})
    decision = decide(resource, observe(foreign))
    assert decision.status.bookkeeping.number == 3
    assert not decision.status.bookkeeping.created


OVER = {
    "validUntilTime": "1970-01-01T02:00:00Z",
    "validInterval": {"startTime": "1970-01-01T01:00:00Z", "endTime": "1970-01-01T02:00:00Z"},
}


@pytest.mark.parametrize("field", OVER)
@pytest.mark.parametrize("asked_before", [True, False], ids=["after an earlier one", "for the first time"])
def test_a_request_whose_time_is_over_is_not_sent(field: str, *, asked_before: bool) -> None:
    resource = make_resource(queueing={field: OVER[field]})
    if asked_before:
        resource = noted(resource.model_copy(update={"status": created().status}), created=False, number=1)
    decision = decide(resource, observe())
    assert decision.actions == ()
    accepted = find(decision, "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "Expired")
    assert field in accepted.message
    assert kinds(decide(resource, observe(), now=7000.0)) == [CreateCloudResource]
