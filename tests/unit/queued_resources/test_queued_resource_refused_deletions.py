"""Test that a refused deletion, while machines cost money, is asked for again within five minutes, and says so."""

import pytest

from fake_cluster.queued_resources import (
    CLUSTER_ID,
    NOW,
    after,
    created,
    decide,
    deleting,
    find,
    kinds,
    make_cloud_resource,
    noted,
    observe,
)
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource, CloudTPUError, ErrorKind
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.queued_resources.decision import Decision, DeleteCloudResource
from stepkeeper_operator.queued_resources.observed import Observed, Outcome, Verb

REFUSALS = (ErrorKind.TERMINAL, ErrorKind.NOT_FOUND, ErrorKind.CREDENTIALS)
WAITS_S = [5, 10, 20, 40, 80, 160, 300, 300]

Removed = tuple[QueuedResource, CloudQueuedResource]


def deleted_object() -> Removed:
    resource = deleting()
    return resource, make_cloud_resource(resource, "ACTIVE")


def suspended() -> Removed:
    resource = created(QueuedResourceState.ACTIVE)
    return resource, make_cloud_resource(resource, "SUSPENDED")


def changed_spec() -> Removed:
    resource = noted(created(QueuedResourceState.ACTIVE, update_policy="Recreate"), spec_hash="another")
    return resource, make_cloud_resource(resource, "ACTIVE")


every_removal = pytest.mark.parametrize("removed", [deleted_object(), suspended(), changed_spec()])


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
    (resource, cloud), now, waits_s = removed, NOW, []
    for _ in WAITS_S:
        resource, _told = refuse(resource, cloud, kind, now)
        due = resource.status.bookkeeping.not_before
        assert due is not None
        waits_s.append(due - now)
        now = float(due)
    assert waits_s == WAITS_S


@every_removal
@pytest.mark.parametrize("kind", ErrorKind)
def test_status_and_event_say_when_a_deletion_is_asked_for_again(kind: ErrorKind, removed: Removed) -> None:
    resource, told = refuse(*removed, kind)
    when = f"the next request is sent at {render_time(NOW + 5)}"
    assert when in find(told, "Active").message
    assert len([event for event in told.events if "the words" in event.message]) == 1
    assert len([event for event in told.events if when in event.message]) == 1
    resting = decide(resource, observe(removed[1], pods=()), now=NOW + 1)
    assert (resting.actions, resting.write_status, resting.events) == ((), False, ())


@every_removal
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_blocked_deletion_is_a_problem_until_it_is_accepted(kind: ErrorKind, removed: Removed) -> None:
    resource, told = refuse(*removed, kind)
    degraded = find(told, "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "DeletionBlocked")
    assert "PERMISSION_DENIED: the words" in degraded.message
    assert "costs money" in degraded.message
    # To retain it lets go of a deleted object's resource; one that is made anew would be deleted all the same.
    assert ("Retain" in degraded.message) is (resource.metadata.deletion_timestamp is not None)
    accepted = Outcome(verb=Verb.DELETE, at=NOW + 5, operation="op")
    seen = observe(removed[1], pods=(), outcome=accepted)
    assert find(decide(resource, seen, now=NOW + 5), "Degraded").status == "False"


def test_the_deletion_of_an_earlier_one_says_when_it_is_asked_for_again() -> None:
    old = make_cloud_resource(created(), "ACTIVE")
    resource = noted(created(QueuedResourceState.ACTIVE), number=1)
    present = make_cloud_resource(resource, "ACTIVE")
    error = CloudTPUError(ErrorKind.TERMINAL, "PERMISSION_DENIED", "the words")
    outcome = Outcome(verb=Verb.DELETE, at=NOW, error=error)
    told = decide(resource, observe(old, present, outcome=outcome))
    assert f"the next request is sent at {render_time(NOW + 5)}" in find(told, "Degraded").message


@every_removal
@pytest.mark.parametrize("kind", ErrorKind)
def test_a_refused_list_hides_no_refused_deletion_that_waits(kind: ErrorKind, removed: Removed) -> None:
    resource, told = refuse(*removed, kind)
    error = CloudTPUError(ErrorKind.TERMINAL, "PERMISSION_DENIED", "may not list")
    blind = Observed(cluster_id=CLUSTER_ID, error=error, pods=())
    meanwhile = decide(resource, blind, now=NOW + 1)
    assert "may not list" in find(meanwhile, "Active").message
    again = decide(after(resource, meanwhile), observe(removed[1], pods=()), now=NOW + 2)
    assert again.actions == ()
    for condition in ("Active", "Degraded"):
        assert find(again, condition).message == find(told, condition).message
        assert find(again, condition).status == find(told, condition).status
    # Once its time has come, the list is what holds the deletion up.
    late = decide(after(resource, meanwhile), blind, now=NOW + 5)
    assert "PERMISSION_DENIED: may not list" in find(late, "Degraded").message
    assert [event for event in late.events if "may not list" in event.message]
    due = decide(after(resource, late), observe(removed[1], pods=()), now=NOW + 6)
    assert kinds(due) == [DeleteCloudResource]


@every_removal
def test_the_look_at_which_a_deletion_is_asked_for_again_comes_at_the_time_that_is_told(
    removed: Removed,
) -> None:
    (resource, cloud), now = removed, NOW
    for wait_s in WAITS_S:
        resource, _told = refuse(resource, cloud, ErrorKind.TERMINAL, now)
        resting = decide(resource, observe(cloud, pods=()), now=now)
        assert resting.requeue_after_s == wait_s
        now += wait_s


def test_an_earlier_one_is_deleted_at_once_though_the_next_creation_waits() -> None:
    old = make_cloud_resource(created(), "ACTIVE")
    resource = noted(created(QueuedResourceState.PENDING), number=1)
    error = CloudTPUError(ErrorKind.TERMINAL, "PERMISSION_DENIED", "may not create")
    outcome = Outcome(verb=Verb.CREATE, at=NOW, error=error)
    refused = decide(resource, observe(outcome=outcome))
    assert refused.status.bookkeeping.not_before == NOW + 3600
    seen = decide(after(resource, refused), observe(old), now=NOW + 20)
    assert kinds(seen) == [DeleteCloudResource]
