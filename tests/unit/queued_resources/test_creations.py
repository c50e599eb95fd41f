"""Test when a cloud resource is asked for: after failures, lost answers and lacks of quota, and within its time."""

from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import (
    CLUSTER_ID,
    NOW,
    SETTINGS,
    after,
    check,
    created,
    decide,
    find,
    kinds,
    list_cloud,
    make_cloud_resource,
    make_node,
    make_resource,
    noted,
    observe,
    with_status,
)
from fake_cluster.stories import table
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
from stepkeeper_operator.cloud_tpu.request import place_of
from stepkeeper_operator.queued_resources.decision import CreateCloudResource, Decision, DeleteCloudResource
from stepkeeper_operator.queued_resources.observed import Observed, Outcome, Verb

NO_QUOTA = CloudTPUError(ErrorKind.QUOTA, "RESOURCE_EXHAUSTED", "no quota")
DOWN = CloudTPUError(ErrorKind.TRANSIENT, "UNAVAILABLE", "words")


def test_a_failed_operation_that_left_nothing_is_tried_with_another_number() -> None:
    operation = CloudOperation(name="op", verb="Create", start_time=int(NOW))
    resource = with_status(created(QueuedResourceState.CREATING), operation=operation)
    running = decide(resource, observe(operation=CloudOperationState(name="op", done=False)))
    assert running.actions == ()
    assert running.status.operation == operation
    assert not running.status.removing, "it isn't taken for deleted by somebody"
    forgotten = decide(resource, observe(), now=NOW + SETTINGS.operation_s)
    assert forgotten.status.operation is None
    failed = decide(resource, observe(operation=CloudOperationState(name="op", done=True, error=NO_QUOTA)))
    assert failed.status.operator.number == 1
    assert not failed.status.operator.created
    assert failed.status.operation is None
    assert find(failed, "QuotaExhausted").status == "True"
    due = decide(after(resource, failed), observe(), now=NOW + 300)
    assert kinds(due) == [CreateCloudResource]


def lose_answer(
    resource: QueuedResource, *shown: CloudQueuedResource, listed_at: float = NOW + 1
) -> Decision:
    """Decide after a creation at NOW that got no answer, with a list of `listed_at` that shows this."""
    listing = list_cloud(shown, asked_at=listed_at)
    outcome = Outcome(verb=Verb.CREATE, at=NOW, error=DOWN)
    return decide(resource, Observed(cluster_id=CLUSTER_ID, listing=listing, outcome=outcome), now=NOW + 1)


def look_later(resource: QueuedResource, *shown: CloudQueuedResource) -> Decision:
    """Decide with a later list, without an answer."""
    listing = list_cloud(shown, asked_at=NOW + 11)
    return decide(resource, Observed(cluster_id=CLUSTER_ID, listing=listing), now=NOW + 11)


ASKED = after(make_resource(), decide(make_resource(), observe()))
MADE = make_cloud_resource(ASKED, "CREATING")
NOT_OURS = replace(MADE, node={**MADE.node, "labels": {}})
AGAIN = after(ASKED, decide(ASKED, observe()))


@table(
    "told, awaited",
    {
        "a list shows what it made": (lose_answer(ASKED, MADE), False),
        "a later list shows what it made": (look_later(after(ASKED, lose_answer(ASKED)), MADE), False),
        "a restarted operator sees what it made": (look_later(ASKED, MADE), False),
        "nothing is shown": (lose_answer(ASKED), True),
        "an earlier list shows it": (lose_answer(ASKED, MADE, listed_at=NOW - 1), True),
        "another's is shown": (lose_answer(ASKED, NOT_OURS), True),
        "an adopted one without labels is shown": (lose_answer(noted(ASKED, adopted=True), NOT_OURS), True),
        "it was sent again after a restart": (lose_answer(AGAIN, MADE), False),
    },
)
def test_a_creation_without_an_answer_is_awaited_until_a_list_proves_that_no_more_comes_of_it(
    told: Decision, *, awaited: bool
) -> None:
    assert told.status.operator.asked_at == (int(NOW) if awaited else None)


def test_a_changed_spec_waits_for_a_request_without_an_answer() -> None:
    resource = noted(created(), asked_at=int(NOW))
    changed = make_resource(resource.status, slices={"image": "another"})
    assert decide(changed, observe(), now=NOW + 89).actions == ()
    assert kinds(decide(changed, observe(), now=NOW + 90)) == [CreateCloudResource]


REFUSED = CloudTPUError(ErrorKind.TERMINAL, "INVALID_ARGUMENT", "there is no v5e in this zone")
ELSEWHERE: dict[str, Any] = {"zone": "us-west4-a"}


def refuse() -> QueuedResource:
    """Let the cloud refuse the first request."""
    return after(ASKED, decide(ASKED, observe(outcome=Outcome(verb=Verb.CREATE, at=NOW, error=REFUSED))))


@pytest.mark.parametrize("changes", [ELSEWHERE, {"project": "another"}, {"slices": {"topology": "2x2"}}])
def test_a_request_that_the_cloud_refused_is_corrected_and_sent_at_once(changes: dict[str, Any]) -> None:
    refused = refuse()
    assert decide(refused, observe(), now=NOW + 1).actions == ()
    corrected = make_resource(refused.status, **changes)
    decision = decide(corrected, observe(), now=NOW + 1)
    (action,) = decision.actions
    assert isinstance(action, CreateCloudResource)
    assert decision.status.cloud_name == f"{place_of(corrected.spec).parent}/queuedResources/team-v5e"
    assert action.request.place == place_of(corrected.spec)


def test_a_request_that_was_lost_in_one_zone_is_awaited_before_it_is_sent_in_another() -> None:
    moved = make_resource(after(ASKED, lose_answer(ASKED)).status, **ELSEWHERE)
    assert decide(moved, observe(), now=NOW + 89).actions == ()
    assert kinds(decide(moved, observe(), now=NOW + 90)) == [CreateCloudResource]
    late = decide(moved, observe(make_cloud_resource(ASKED, "ACTIVE")))
    check(late, "Degraded", "True/SpecMismatch", "updatePolicy: Recreate")
    replaced = make_resource(moved.status, **ELSEWHERE, updatePolicy="Recreate")
    assert decide(replaced, observe(make_cloud_resource(ASKED, "ACTIVE"))).status.removing == "SpecChanged"


@pytest.mark.parametrize("name", ["", "projects/123456789/locations/us-central2-b/queuedResources/team-v5e"])
def test_a_project_by_its_number_is_no_change(name: str) -> None:
    resource = noted(created(QueuedResourceState.ACTIVE, updatePolicy="Recreate"), cloud_name=name)
    cloud = make_cloud_resource(resource, "ACTIVE")
    assert not decide(resource, observe(cloud, nodes=[make_node(cloud)])).status.removing


def test_an_error_of_lists_that_passes_leaves_the_back_off_alone() -> None:
    resource = noted(make_resource(QueuedResourceStatus(observed_generation=1)), next_try_time=int(NOW + 500))
    error = CloudTPUError(ErrorKind.TERMINAL, "PERMISSION_DENIED", "may not list")
    told = decide(resource, Observed(cluster_id="cluster-uid", error=error))
    passed = decide(after(resource, told), observe())
    assert passed.status.error is None
    assert passed.actions == ()
    assert passed.status.next_try_time == int(NOW + 500)


def test_the_next_one_is_asked_for_after_the_old_one_is_gone_and_after_the_back_off() -> None:
    resource = noted(
        created(QueuedResourceState.SUSPENDED), removing="Suspended", removing_since=9000, streak=2
    )
    assert decide(resource, observe(make_cloud_resource(resource, "DELETING"), pods=())).actions == ()
    gone = decide(resource, observe(pods=()))
    book = gone.status.operator
    assert (book.number, book.created, book.streak, gone.status.removing) == (1, False, 3, "")
    assert gone.status.next_try_time == int(NOW + 120)
    assert gone.status.recreations == 1
    assert decide(after(resource, gone), observe(), now=NOW + 119).actions == ()
    due = decide(after(resource, gone), observe(), now=NOW + 120)
    assert kinds(due) == [CreateCloudResource]
    assert due.status.cloud_name.endswith("/team-v5e-r1")


UNTIL_60_S: dict[str, Any] = {"queueing": {"validUntilSeconds": 60}}
KEPT: dict[str, Any] = {**UNTIL_60_S, "recreate_policy": {"onFailed": "Keep"}}
INTERVAL: dict[str, Any] = {
    "queueing": {"validAfterTime": "1970-01-01T02:00:00Z", "validUntilTime": "1970-01-01T03:00:00Z"}
}
WAITING, BEFORE, NOW_MADE = (
    "WAITING_FOR_RESOURCES",
    {"create_time": int(NOW) - 100},
    {"create_time": int(NOW)},
)
BROKEN, LATE = {"error_code": "INTERNAL"}, {"error_code": "DEADLINE_EXCEEDED"}


@table(
    "spec, active_since, state, cloud, after_s, removing",
    {
        "not before its time": (UNTIL_60_S, None, WAITING, BEFORE, 0, ""),
        "it waits too long": (UNTIL_60_S, None, WAITING, BEFORE, 21, "Expired"),
        "not within its interval": (INTERVAL, None, WAITING, {}, 0, ""),
        "its interval is over": (INTERVAL, None, WAITING, {}, 860, "Expired"),
        "it failed at its time": (KEPT, None, "FAILED", {}, 0, "Expired"),
        "not once it was active": (KEPT, 2000, "FAILED", BROKEN, 0, ""),
        "not if it failed before": (KEPT, None, "FAILED", NOW_MADE | BROKEN, 0, ""),
        "it failed of its time": (KEPT, None, "FAILED", NOW_MADE | LATE, 90, "Expired"),
    },
)
def test_a_request_is_removed_because_its_time_is_over(
    spec: dict[str, Any],
    active_since: int | None,
    state: str,
    cloud: dict[str, Any],
    after_s: int,
    removing: str,
) -> None:
    resource = noted(created(QueuedResourceState.WAITING, **spec), active_since=active_since)
    decision = decide(resource, observe(make_cloud_resource(resource, state, **cloud)), now=NOW + after_s)
    assert decision.status.removing == removing


def test_what_has_expired_stays_gone_until_the_spec_changes_if_the_policy_says_so() -> None:
    resource = created(QueuedResourceState.WAITING, **KEPT)
    resource = after(resource, decide(resource, observe(make_cloud_resource(resource, "FAILED"))))
    gone = decide(resource, observe(pods=()), now=NOW + 60)
    assert gone.status.state is QueuedResourceState.GONE
    resource = after(resource, gone)
    assert decide(resource, observe(), now=NOW + 90_000).actions == ()
    changed = resource.model_copy(update={"spec": resource.spec.model_copy(update={"queueing": None})})
    assert kinds(decide(changed, observe(), now=NOW + 90_000)) == [CreateCloudResource]


UNTIL = {"validUntilTime": "1970-01-01T02:00:00Z"}


@pytest.mark.parametrize("queueing", [UNTIL, UNTIL | {"validAfterTime": "1970-01-01T01:00:00Z"}])
@pytest.mark.parametrize("asked_before", [True, False], ids=["after an earlier one", "for the first time"])
def test_a_request_whose_time_is_over_is_not_sent(queueing: dict[str, str], *, asked_before: bool) -> None:
    resource = make_resource(queueing=queueing)
    if asked_before:
        resource = noted(resource.model_copy(update={"status": created().status}), created=False, number=1)
    decision = decide(resource, observe())
    assert decision.actions == ()
    check(decision, "Accepted", "False/Expired", "validUntilTime")
    assert kinds(decide(resource, observe(), now=7000.0)) == [CreateCloudResource]


def lack_quota(resource: QueuedResource, now: float, how: str) -> QueuedResource:
    """Ask for it, and tell of the lack by a refusal, or by the state or the operation of what the cloud took."""
    asked = decide(resource, observe(), now=now)
    assert kinds(asked) == [CreateCloudResource]
    resource = after(resource, asked)
    if how == "refusal":
        return after(
            resource,
            decide(resource, observe(outcome=Outcome(verb=Verb.CREATE, at=now, error=NO_QUOTA)), now=now),
        )
    outcome = Outcome(verb=Verb.CREATE, at=now, operation="op")
    resource = after(resource, decide(resource, observe(outcome=outcome), now=now))
    if how == "operation":
        failed = CloudOperationState(name="op", done=True, error=NO_QUOTA)
        return after(resource, decide(resource, observe(operation=failed), now=now))
    cloud = make_cloud_resource(resource, "FAILED", error_code=NO_QUOTA.code, error_message="no quota")
    done = CloudOperationState(name="op", done=True)
    told = decide(resource, observe(cloud, operation=done), now=now)
    assert kinds(told) == [DeleteCloudResource], "it frees what is left"
    assert find(told, "QuotaExhausted").status == "True"
    return after(resource, decide(after(resource, told), observe(pods=()), now=now))


@pytest.mark.parametrize(
    "ways",
    [["state"] * 5, ["operation"] * 5, ["state", "operation", "state"], ["refusal", "state"]],
    ids=", ".join,
)
def test_a_lack_of_quota_is_tried_again_ever_more_slowly(ways: list[str]) -> None:
    resource, now, waits = make_resource(recreate_policy={"max": 0}), NOW, []
    for how in ways:
        resource = lack_quota(resource, now, how)
        due = resource.status.next_try_time
        assert due is not None
        assert resource.status.operator.streak == 0, "it is no failure"
        waits.append(due - now)
        now += waits[-1]
    assert waits == [300, 600, 1200, 1800, 1800][: len(ways)]


def test_a_smaller_wish_is_tried_at_once_and_an_active_resource_starts_the_count_of_lacks_anew() -> None:
    resource = lack_quota(make_resource(), NOW, "state")
    assert decide(resource, observe(), now=NOW + 1).actions == ()
    smaller = make_resource(resource.status, slices={"topology": "2x2"})
    assert kinds(decide(smaller, observe(), now=NOW + 1)) == [CreateCloudResource]
    resource = noted(created(QueuedResourceState.PROVISIONING), quota_failures=3)
    cloud = make_cloud_resource(resource, "ACTIVE")
    assert decide(resource, observe(cloud, nodes=[make_node(cloud)])).status.operator.quota_failures == 0
