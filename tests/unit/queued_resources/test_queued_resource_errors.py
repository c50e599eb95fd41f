"""Test the decisions after errors of the Cloud TPU API: told once, tried again in their time."""

from dataclasses import replace

import pytest

from fake_cluster.queued_resources import (
    CLUSTER_ID,
    NOW,
    SETTINGS,
    after,
    created,
    decide,
    find,
    kinds,
    list_cloud,
    make_cloud_resource,
    make_resource,
    noted,
    observe,
    with_status,
)
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
from stepkeeper_operator.queued_resources.decision import (
    CreateCloudResource,
    Decision,
    DeleteCloudResource,
)
from stepkeeper_operator.queued_resources.observed import Observed, Outcome, Verb
from stepkeeper_operator.queued_resources.pacing import compute_retry_s

ERRORS = {
    ErrorKind.QUOTA: ("RESOURCE_EXHAUSTED", 300, ("QuotaExhausted", "True")),
    ErrorKind.TERMINAL: ("INVALID_ARGUMENT", 3600, ("Accepted", "False")),
    ErrorKind.NOT_FOUND: ("NOT_FOUND", 3600, ("Accepted", "False")),
    ErrorKind.CREDENTIALS: ("UNAUTHENTICATED", 300, ("Accepted", "False")),
    ErrorKind.ALREADY_EXISTS: ("ALREADY_EXISTS", 5, ("Accepted", "False")),
    ErrorKind.BUSY: ("FAILED_PRECONDITION", 5, ("Accepted", "Unknown")),
    ErrorKind.TRANSIENT: ("UNAVAILABLE", 5, ("Accepted", "Unknown")),
}


RETRIES = {
    (ErrorKind.QUOTA, 1): 300,
    (ErrorKind.QUOTA, 2): 600,
    (ErrorKind.QUOTA, 50): 1800,
    (ErrorKind.TRANSIENT, 1): 5,
    (ErrorKind.TRANSIENT, 4): 40,
    (ErrorKind.TRANSIENT, 50): 300,
    (ErrorKind.TERMINAL, 1): 3600,
    (ErrorKind.CREDENTIALS, 9): 300,
}


@pytest.mark.parametrize("kind", ErrorKind)
def test_an_error_of_the_creation_is_told_once_and_tried_again_in_its_time(kind: ErrorKind) -> None:
    code, wait_s, (condition, value) = ERRORS[kind]
    asked = decide(make_resource(), observe())
    resource = after(make_resource(), asked)
    outcome = Outcome(verb=Verb.CREATE, at=NOW, error=CloudTPUError(kind, code, "the words"))
    told = decide(resource, observe(outcome=outcome))
    assert told.actions == ()
    assert told.status.error is not None
    assert told.status.error.message == "the words"
    assert find(told, condition).status == value
    assert len([event for event in told.events if "the words" in event.message]) == 1
    resource = after(resource, told)
    quiet = decide(resource, observe(), now=NOW + wait_s - 1)
    assert (quiet.actions, quiet.write_status) == ((), False)
    again = decide(resource, observe(), now=NOW + wait_s)
    assert kinds(again) == [CreateCloudResource]
    twice = decide(
        after(resource, again), observe(outcome=replace(outcome, at=NOW + wait_s)), now=NOW + wait_s
    )
    assert not [event for event in twice.events if "the words" in event.message]


@pytest.mark.parametrize("kind", [ErrorKind.TERMINAL, ErrorKind.QUOTA, ErrorKind.NOT_FOUND])
def test_a_changed_spec_is_tried_at_once_after_an_error(kind: ErrorKind) -> None:
    outcome = Outcome(verb=Verb.CREATE, at=NOW, error=CloudTPUError(kind, "X", "words"))
    resource = created()
    resource = after(resource, decide(resource, observe(outcome=outcome)))
    changed = make_resource(resource.status, node={"runtimeVersion": "another"})
    assert kinds(decide(changed, observe(), now=NOW + 1)) == [CreateCloudResource]


def test_a_failed_operation_that_left_nothing_is_tried_with_another_number() -> None:
    operation = CloudOperation(name="op", verb="Create", start_time=int(NOW))
    resource = with_status(created(QueuedResourceState.CREATING), operation=operation)
    running = decide(resource, observe(operation=CloudOperationState(name="op", done=False)))
    assert running.actions == ()
    assert running.status.operation == operation
    assert not running.status.bookkeeping.removing, "it isn't taken for deleted by somebody"
    forgotten = decide(resource, observe(), now=NOW + SETTINGS.operation_s)
    assert forgotten.status.operation is None
    error = CloudTPUError(ErrorKind.QUOTA, "RESOURCE_EXHAUSTED", "no quota")
    failed = decide(resource, observe(operation=CloudOperationState(name="op", done=True, error=error)))
    assert failed.status.bookkeeping.number == 1
    assert not failed.status.bookkeeping.created
    assert failed.status.operation is None
    assert find(failed, "QuotaExhausted").status == "True"
    due = decide(after(resource, failed), observe(), now=NOW + 300)
    assert kinds(due) == [CreateCloudResource]


def test_a_failure_for_lack_of_quota_frees_what_is_left_and_is_no_failure() -> None:
    resource = noted(created(QueuedResourceState.CREATING, recreate_policy={"max": 0}), streak=0)
    cloud = make_cloud_resource(resource, "FAILED", error_code="RESOURCE_EXHAUSTED", error_message="no quota")
    decision = decide(resource, observe(cloud))
    assert kinds(decision) == [DeleteCloudResource]
    assert find(decision, "QuotaExhausted").status == "True"
    gone = decide(after(resource, decision), observe(pods=()))
    assert gone.status.bookkeeping.streak == 0
    assert gone.status.bookkeeping.not_before == int(NOW + 300)
    assert find(gone, "QuotaExhausted").status == "True"


@pytest.mark.parametrize("kind", ErrorKind)
def test_a_request_without_an_answer_may_still_be_carried_out(kind: ErrorKind) -> None:
    resource = after(make_resource(), decide(make_resource(), observe()))
    outcome = Outcome(verb=Verb.CREATE, at=NOW, error=CloudTPUError(kind, "X", "words"))
    told = decide(resource, observe(outcome=outcome))
    assert (told.status.bookkeeping.asked_at is not None) is (kind is ErrorKind.TRANSIENT)
    done = decide(resource, observe(outcome=replace(outcome, error=None, operation="op")))
    assert done.status.bookkeeping.asked_at is None


def lose_answer(
    resource: QueuedResource, *shown: CloudQueuedResource, listed_at: float = NOW + 1
) -> Decision:
    """Decide after a creation at NOW that got no answer, with a list of `listed_at` that shows this."""
    error = CloudTPUError(ErrorKind.TRANSIENT, "UNAVAILABLE", "words")
    outcome = Outcome(verb=Verb.CREATE, at=NOW, error=error)
    listing = list_cloud(shown, asked_at=listed_at)
    return decide(resource, Observed(cluster_id=CLUSTER_ID, listing=listing, outcome=outcome), now=NOW + 1)


def test_a_creation_without_an_answer_is_awaited_no_longer_once_a_list_shows_what_it_made() -> None:
    resource = after(make_resource(), decide(make_resource(), observe()))
    made = make_cloud_resource(resource, "CREATING")
    told = lose_answer(resource, made)
    assert told.status.bookkeeping.asked_at is None
    later = after(resource, lose_answer(resource))
    assert later.status.bookkeeping.asked_at == int(NOW)
    listing = list_cloud([made], asked_at=NOW + 11)
    seen = decide(later, Observed(cluster_id=CLUSTER_ID, listing=listing), now=NOW + 11)
    assert seen.status.bookkeeping.asked_at is None


def test_a_creation_that_an_operator_has_not_lived_to_see_answered_is_awaited_until_it_is_listed() -> None:
    resource = after(make_resource(), decide(make_resource(), observe()))
    listing = list_cloud([make_cloud_resource(resource, "CREATING")], asked_at=NOW + 11)
    seen = decide(resource, Observed(cluster_id=CLUSTER_ID, listing=listing), now=NOW + 11)
    assert seen.status.bookkeeping.asked_at is None


def test_a_creation_that_was_sent_again_after_a_restart_is_awaited_though_one_is_listed() -> None:
    resource = after(make_resource(), decide(make_resource(), observe()))
    again = decide(resource, observe())
    assert kinds(again) == [CreateCloudResource]
    resource = after(resource, again)
    made = make_cloud_resource(resource, "CREATING")
    listing = list_cloud([made], asked_at=NOW + 11)
    seen = decide(resource, Observed(cluster_id=CLUSTER_ID, listing=listing), now=NOW + 11)
    for told in (lose_answer(resource, made), seen):
        assert told.status.bookkeeping.asked_at == int(NOW)


def test_a_creation_is_awaited_while_a_list_does_not_prove_that_nothing_more_comes_of_it() -> None:
    resource = after(make_resource(), decide(make_resource(), observe()))
    made = make_cloud_resource(resource, "CREATING")
    nobodys = replace(made, node={**made.node, "labels": {}})
    another = noted(resource, retries=1)
    for told in (
        lose_answer(resource),
        lose_answer(resource, made, listed_at=NOW - 1),
        lose_answer(resource, nobodys),
        lose_answer(noted(resource, adopted=True), nobodys),
        lose_answer(another, made),
    ):
        assert told.status.bookkeeping.asked_at == int(NOW)
    # Two requests were sent, and one of them may still be on its way: what the list shows later is no news.
    twice = after(another, lose_answer(another, made))
    listing = list_cloud([made], asked_at=NOW + 11)
    seen = decide(twice, Observed(cluster_id=CLUSTER_ID, listing=listing), now=NOW + 11)
    assert seen.status.bookkeeping.asked_at == int(NOW)


def test_a_changed_spec_waits_for_a_request_without_an_answer() -> None:
    resource = noted(created(), asked_at=int(NOW))
    changed = make_resource(resource.status, node={"runtimeVersion": "another"})
    assert decide(changed, observe(), now=NOW + 89).actions == ()
    assert kinds(decide(changed, observe(), now=NOW + 90)) == [CreateCloudResource]


def test_an_error_of_lists_that_passes_leaves_the_back_off_alone() -> None:
    resource = noted(make_resource(QueuedResourceStatus(observed_generation=1)), not_before=int(NOW + 500))
    error = CloudTPUError(ErrorKind.TERMINAL, "PERMISSION_DENIED", "may not list")
    told = decide(resource, Observed(cluster_id="cluster-uid", error=error))
    assert find(told, "Accepted").reason == "Refused"
    passed = decide(after(resource, told), observe())
    assert passed.status.error is None
    assert passed.actions == ()
    assert passed.status.bookkeeping.not_before == int(NOW + 500)


@pytest.mark.parametrize(("kind", "retries"), RETRIES)
def test_waits_double_up_to_a_bound(kind: ErrorKind, retries: int) -> None:
    assert compute_retry_s(kind, retries, SETTINGS) == RETRIES[kind, retries]
