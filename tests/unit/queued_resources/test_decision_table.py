"""Test the rows of the truth table that people ask about: actions, conditions and the next reconcile."""

import re
from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import (
    NOW,
    SETTINGS,
    after,
    check,
    created,
    decide,
    find,
    kinds,
    make_cloud_resource,
    make_node,
    make_resource,
    noted,
    observe,
    with_status,
)
from fake_cluster.resource_cells import STATES, WISHES, WORDS, make_cell
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    CloudError,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudTPUError, ErrorKind
from stepkeeper_operator.queued_resources.decision import (
    Action,
    Cordon,
    CreateCloudResource,
    Decision,
    DeleteCloudResource,
    LabelNodes,
    SetFinalizer,
)
from stepkeeper_operator.queued_resources.observed import Observed, Outcome, Verb

CREATE, DELETE, LET_GO = CreateCloudResource, DeleteCloudResource, SetFinalizer
NOTHING: tuple[type[Action], ...] = ()
NEVER = None
AT_ONCE, FAST_S, ACTIVE_S, WAITING_S, BACKOFF_S = 0.05, 10.0, 60.0, 120.0, 500.0
ANEW, KEPT, SPENT = "unchanged, made anew", "unchanged, kept", "unchanged, the budget is spent"
REFUSED, CHANGED, DELETED = "changed, refused, made anew", "changed, recreated, made anew", "deleted"

Row = tuple[str, str, tuple[type[Action], ...], str, str, float | None]

# situation, wish, actions, reason of the removal, conditions, seconds to the next look
SITUATIONS: tuple[Row, ...] = (
    ("nothing asked for", ANEW, (CREATE,), "", "Active=False/Pending", AT_ONCE),
    ("CREATING", ANEW, NOTHING, "", "Active=False/Creating", FAST_S),
    ("ACCEPTED", ANEW, NOTHING, "", "Active=False/Accepted", WAITING_S),
    ("WAITING_FOR_RESOURCES", ANEW, NOTHING, "", "Active=False/WaitingForResources", WAITING_S),
    ("PROVISIONING", ANEW, NOTHING, "", "Active=False/Provisioning", FAST_S),
    ("ACTIVE", ANEW, NOTHING, "", "Active=True/Active", ACTIVE_S),
    ("ACTIVE", REFUSED, NOTHING, "", "Degraded=True/SpecMismatch", ACTIVE_S),
    ("ACTIVE", CHANGED, (Cordon, DELETE), "SpecChanged", "Active=False/SpecChanged", AT_ONCE),
    ("PROVISIONING", CHANGED, (DELETE,), "SpecChanged", "Active=False/SpecChanged", AT_ONCE),
    ("ACTIVE", DELETED, (Cordon, DELETE), "Deleted", "Active=False/Deleted", AT_ONCE),
    ("ACTIVE", "deleted and retained", (LET_GO,), "", "", NEVER),
    ("SUSPENDING", ANEW, NOTHING, "", "Active=False/Suspending", FAST_S),
    ("SUSPENDED", ANEW, (DELETE,), "Suspended", "Active=False/Suspended", AT_ONCE),
    ("SUSPENDED", KEPT, NOTHING, "", "Degraded=True/Suspended", WAITING_S),
    ("SUSPENDED", SPENT, NOTHING, "", "Degraded=True/RecreationsExhausted", WAITING_S),
    ("FAILED", ANEW, (DELETE,), "Failed", "Active=False/Failed", AT_ONCE),
    ("FAILED", KEPT, NOTHING, "", "Degraded=True/Failed", WAITING_S),
    ("FAILED", SPENT, NOTHING, "", "Degraded=True/RecreationsExhausted", WAITING_S),
    ("FAILED", CHANGED, (DELETE,), "SpecChanged", "Active=False/SpecChanged", AT_ONCE),
    ("DELETING", ANEW, NOTHING, "", "Active=False/Deleting", FAST_S),
    ("DELETING", DELETED, NOTHING, "Deleted", "Active=False/Deleted", FAST_S),
    ("SOMETHING_NEW", ANEW, NOTHING, "", "Active=False/Unknown", FAST_S),
    ("SOMETHING_NEW", DELETED, (DELETE,), "Deleted", "Active=False/Deleted", AT_ONCE),
    ("active, preempted", ANEW, (Cordon, DELETE), "Preempted", "Active=False/Preempted", AT_ONCE),
    ("active, preempted", KEPT, NOTHING, "", "Degraded=True/Preempted", WAITING_S),
    ("active, without nodes", ANEW, (DELETE,), "Preempted", "Active=False/Preempted", AT_ONCE),
    ("active, under repair", ANEW, NOTHING, "", "Degraded=True/SliceNotReady", ACTIVE_S),
    ("vanished", ANEW, NOTHING, "", "Active=False/Pending", AT_ONCE),
    ("vanished", KEPT, NOTHING, "", "Active=False/Gone", AT_ONCE),
    ("gone for good", KEPT, NOTHING, "", "Degraded=True/Gone", NEVER),
    ("gone for good", CHANGED, (CREATE,), "", "Active=False/Pending", AT_ONCE),
    ("between two", ANEW, NOTHING, "", "Active=False/Pending", BACKOFF_S),
    ("due again", ANEW, (CREATE,), "", "Active=False/Pending", AT_ONCE),
    ("being replaced", ANEW, (DELETE,), "Suspended", "Active=False/Suspended", AT_ONCE),
    ("being replaced", KEPT, (DELETE,), "Suspended", "Active=False/Suspended", AT_ONCE),
    ("being replaced, deleted", ANEW, NOTHING, "Suspended", "Active=False/Suspended", FAST_S),
    ("being replaced, gone", ANEW, NOTHING, "", "Active=False/Pending", AT_ONCE),
    ("asked for, on its way", DELETED, NOTHING, "Deleted", "Active=False/Deleted", FAST_S),
    ("somebody else's", ANEW, NOTHING, "", "Accepted=False/OwnedByOther", WAITING_S),
    ("somebody else's", DELETED, (LET_GO,), "", "", NEVER),
    ("unlabeled", ANEW, NOTHING, "", "Accepted=False/OwnedByOther", WAITING_S),
    ("unlabeled", DELETED, (LET_GO,), "", "", NEVER),
    ("of an earlier object", ANEW, NOTHING, "", "Accepted=False/OwnedByOther", WAITING_S),
    ("of an earlier object, going", ANEW, NOTHING, "", "Accepted=False/OwnedByOther", FAST_S),
    ("of no name, to be adopted", ANEW, NOTHING, "", "Accepted=False/OwnedByOther", WAITING_S),
    ("unlabeled, to be adopted", ANEW, (LabelNodes,), "", "Accepted=Unknown/Adopting", FAST_S),
    ("unlabeled, to be adopted", DELETED, (LET_GO,), "", "", NEVER),
    ("of an earlier object, to be adopted", ANEW, (LabelNodes,), "", "Accepted=Unknown/Adopting", FAST_S),
    ("different, to be adopted", ANEW, NOTHING, "", "Accepted=False/SpecMismatch", WAITING_S),
    ("unlabeled, another id to be adopted", ANEW, NOTHING, "", "Accepted=False/OwnedByOther", WAITING_S),
    ("ours, the status lost", ANEW, NOTHING, "", "Active=True/Active", AT_ONCE),
    ("a stray", ANEW, (DELETE,), "", "Degraded=True/DuplicateResource", FAST_S),
    ("a stray, the next one waits", ANEW, (DELETE,), "", "Degraded=True/DuplicateResource", FAST_S),
    ("being replaced, gone, its name is taken", ANEW, NOTHING, "", "Active=False/Pending", AT_ONCE),
    ("being replaced, its name is taken", ANEW, NOTHING, "", "Accepted=False/OwnedByOther", WAITING_S),
)

# the object's situation, the answer, the condition, seconds to the next look; no such answer destroys or makes anything
ERRORS: tuple[tuple[str, str, str, str, float], ...] = (
    ("asked for", ANEW, "Create: Quota", "QuotaExhausted=True/QuotaExhausted", 300),
    ("asked for", ANEW, "Create: Terminal", "Accepted=False/Refused", 3600),
    ("asked for", ANEW, "Create: NotFound", "Accepted=False/Refused", 3600),
    ("asked for", ANEW, "Create: AlreadyExists", "Accepted=False/AlreadyExists", 5),
    ("asked for", ANEW, "Create: Busy", "Active=False/Pending", 5),
    ("asked for", ANEW, "Create: Transient", "Active=False/Pending", 5),
    ("asked for", ANEW, "Create: Credentials", "Accepted=False/NoCredentials", 300),
    ("asked for", ANEW, "operation Create: Quota", "QuotaExhausted=True/QuotaExhausted", 300),
    ("asked for", ANEW, "operation Create: Terminal", "Accepted=False/Refused", 3600),
    ("asked for", ANEW, "operation Create: Busy", "Active=False/Pending", 5),
    ("asked for", ANEW, "operation Create: Transient", "Active=False/Pending", 5),
    ("being replaced", ANEW, "Delete: Quota", "Active=False/Suspended", 5),
    ("being replaced", ANEW, "Delete: Terminal", "Degraded=True/DeletionBlocked", 5),
    ("being replaced", ANEW, "Delete: NotFound", "Degraded=True/DeletionBlocked", 5),
    ("being replaced", ANEW, "Delete: Busy", "Active=False/Suspended", 5),
    ("being replaced", ANEW, "Delete: Transient", "Active=False/Suspended", 5),
    ("being replaced", ANEW, "Delete: Credentials", "Degraded=True/DeletionBlocked", 5),
    ("being replaced", ANEW, "operation Delete: Busy", "Active=False/Suspended", 5),
    ("being replaced", ANEW, "operation Delete: Terminal", "Degraded=True/DeletionBlocked", 5),
    ("asked for", ANEW, "list: Terminal", "Accepted=False/Refused", ACTIVE_S),
    ("asked for", ANEW, "list: NotFound", "Accepted=False/Refused", ACTIVE_S),
    ("asked for", ANEW, "list: Credentials", "Accepted=False/NoCredentials", ACTIVE_S),
    ("ACTIVE", ANEW, "list: Terminal", "Accepted=False/Refused", ACTIVE_S),
    ("ACTIVE", DELETED, "list: Terminal", "Degraded=True/DeletionBlocked", FAST_S),
    ("ACTIVE", DELETED, "list: NotFound", "Degraded=True/DeletionBlocked", FAST_S),
    ("ACTIVE", DELETED, "list: Credentials", "Degraded=True/DeletionBlocked", FAST_S),
    ("ACTIVE", DELETED, "list: Transient", "Active=False/Deleted", FAST_S),
    ("ACTIVE", DELETED, "list: Quota", "Active=False/Deleted", FAST_S),
)
_WISHES = {wish.name: wish for wish in WISHES}


def check_messages(decision: Decision) -> None:
    """Check that a condition has a message unless all is as expected, and a failed deletion the next time."""
    for condition in decision.status.conditions:
        assert condition.message or condition.reason == "AsExpected", condition.type
    error, removing = decision.status.error, decision.status.removing
    if removing and error is not None:
        assert re.search(
            r"next request is sent at|is read again every 10 s", find(decision, "Active").message
        )


@pytest.mark.parametrize(("situation", "wish", "actions", "removing", "said", "look_s"), SITUATIONS)
def test_what_follows_from_a_situation(
    situation: str,
    wish: str,
    actions: tuple[type[Action], ...],
    removing: str,
    said: str,
    look_s: float | None,
) -> None:
    cell = make_cell(situation, "no error", _WISHES[wish])
    decision = decide(cell.resource, cell.observed)
    assert tuple(type(action) for action in decision.actions) == actions
    assert decision.status.removing == removing
    if said:
        kind, _, value = said.partition("=")
        condition = find(decision, kind)
        assert f"{condition.status}/{condition.reason}" == value
        assert "None" not in condition.message
    check_messages(decision)
    if look_s is None:
        assert decision.requeue_after_s is None
    else:
        assert decision.requeue_after_s is not None
        assert look_s <= decision.requeue_after_s <= 1.1 * look_s


@pytest.mark.parametrize(("situation", "wish", "answer", "said", "look_s"), ERRORS)
def test_what_follows_from_an_error(situation: str, wish: str, answer: str, said: str, look_s: float) -> None:
    cell = make_cell(situation, answer, _WISHES[wish])
    decision = decide(cell.resource, cell.observed)
    assert not [action for action in decision.actions if not isinstance(action, Cordon)]
    kind, _, value = said.partition("=")
    check(decision, kind, value, WORDS)
    check_messages(decision)
    assert [event for event in decision.events if WORDS in event.message] or wish == DELETED
    assert decision.requeue_after_s is not None
    assert look_s <= decision.requeue_after_s <= 1.1 * look_s
    resource = after(cell.resource, decision)
    again = decide(resource, cell.observed)
    assert not [event for event in again.events if WORDS in event.message], "each is told once"
    if answer.startswith("list"):
        return
    waiting = replace(cell.observed, outcome=None, operation=None)
    quiet = decide(resource, waiting, now=NOW + look_s - 1)
    assert (quiet.actions, quiet.write_status) == ((), False)
    asked_again = CREATE if situation == "asked for" else DELETE
    assert kinds(decide(resource, waiting, now=NOW + look_s)) == [asked_again]


def test_a_stray_that_may_not_be_deleted_is_told_with_the_clouds_words() -> None:
    cell = make_cell("a stray", "no error", _WISHES[ANEW])
    assert "next request" not in find(decide(cell.resource, cell.observed), "Degraded").message
    error = CloudError(
        code="PERMISSION_DENIED", message="may not delete", kind="Terminal", verb="Delete", time=9000
    )
    refused = noted(with_status(cell.resource, error=error), retries=1, next_try_time=20_000)
    decision = decide(refused, cell.observed)
    assert decision.actions == ()
    assert "PERMISSION_DENIED: may not delete" in find(decision, "Degraded").message


def test_a_name_that_is_taken_as_soon_as_the_deletion_is_accepted_is_passed_over() -> None:
    cell = make_cell("being replaced, its name is taken", "Delete: taken", _WISHES[ANEW])
    taken = Outcome(verb=Verb.DELETE, at=NOW - 1)
    assert decide(cell.resource, replace(cell.observed, outcome=taken)).status.operator.number == 1


@pytest.mark.parametrize(
    "error",
    [None, CloudError(code="RESOURCE_EXHAUSTED", message="no", kind="Quota", verb="Create", time=9000)],
    ids=["after an end", "after a refusal"],
)
def test_a_stray_that_is_deleted_leaves_the_time_of_the_next_creation_alone(error: CloudError | None) -> None:
    cell = make_cell("a stray, the next one waits", "Delete: taken", _WISHES[ANEW])
    decision = decide(with_status(cell.resource, error=error), cell.observed)
    assert decision.status.next_try_time == int(NOW) + 500
    assert decision.status.error == error


@pytest.mark.parametrize("kind", [ErrorKind.TRANSIENT, ErrorKind.TERMINAL])
def test_a_new_object_shows_why_the_cloud_can_not_be_read(kind: ErrorKind) -> None:
    error = CloudTPUError(kind, "UNAVAILABLE", "down")
    decision = decide(make_resource(), Observed(cluster_id="cluster-uid", error=error, listed_at=NOW))
    check_messages(decision)
    check(decision, "Active", "False/Pending", "UNAVAILABLE: down", "is read again every")
    assert find(decision, "Active").message.count("down") == 1


def test_a_failure_without_details_has_a_message() -> None:
    resource = created(recreate_policy={"onFailed": "Keep"})
    check_messages(decide(resource, observe(make_cloud_resource(resource, "FAILED"))))


def test_waits_double_up_to_a_bound() -> None:
    for kind, waits_s in {
        ErrorKind.QUOTA: {1: 300, 2: 600, 50: 1800},
        ErrorKind.TRANSIENT: {1: 5, 4: 40, 50: 300},
        ErrorKind.TERMINAL: {1: 3600},
        ErrorKind.CREDENTIALS: {9: 300},
    }.items():
        assert {retries: SETTINGS.compute_retry_s(kind, retries) for retries in waits_s} == waits_s


def test_nothing_is_asked_of_the_cloud_before_the_finalizer_is_seen() -> None:
    decision = decide(make_resource(finalizers=()), observe())
    assert decision.actions == (SetFinalizer(present=True),)
    assert not decision.write_status
    lost = created(QueuedResourceState.ACTIVE, finalizers=())
    assert decide(lost, observe(make_cloud_resource(lost, "SUSPENDED"))).actions == decision.actions
    error = CloudTPUError(ErrorKind.CREDENTIALS, "UNAUTHENTICATED", "no credentials")
    decision = decide(make_resource(finalizers=()), Observed(cluster_id="cluster-uid", error=error))
    assert decision.actions == (), "it can ask for nothing"
    assert find(decision, "Accepted").reason == "NoCredentials"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("deleting", [True, False], ids=["deleting", "wanted"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "not asked for"])
@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"stepkeeper-cluster": "other", "stepkeeper-uid": "uid-9"}, "uid-9"),
        ({"stepkeeper-cluster": "cluster-uid", "stepkeeper-uid": "uid-2"}, "uid-2"),
        ({}, "has no label"),
    ],
    ids=["another cluster's", "another object's", "unlabeled"],
)
def test_what_is_not_ours_is_never_touched(
    state: str, labels: dict[str, str], said: str, *, asked: bool, deleting: bool
) -> None:
    resource = created() if asked else make_resource()
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
    check(decision, "Accepted", "False/OwnedByOther", "stepkeeper.dev/adopt: team-v5e on", state, said)


ENDS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("SUSPENDED", {"onFailed": "Keep"}, True),
    ("FAILED", {"onSuspended": "Keep"}, True),
    ("FAILED", {"max": 2}, True),
    ("FAILED", {"max": 1}, False),
)


@pytest.mark.parametrize(("state", "policy", "removed"), ENDS)
def test_the_recreate_policy_says_what_happens_at_an_end(
    state: str, policy: dict[str, Any], *, removed: bool
) -> None:
    resource = noted(created(QueuedResourceState.ACTIVE, recreate_policy=policy), streak=1)
    decision = decide(resource, observe(make_cloud_resource(resource, state)))
    assert kinds(decision) == ([DELETE] if removed else [])
    assert (find(decision, "Degraded").status == "True") is not removed


NODE_ENDS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("STOPPED", {}, "Preempted", "AsExpected"),
    ("STOPPED", {"tier": {"bestEffort": {}}}, "Preempted", "AsExpected"),
    ("STOPPED", {"tier": {"guaranteed": {}}}, "", "SliceNotReady"),
    ("STOPPED", {"recreate_policy": {"onSuspended": "Keep"}}, "", "Preempted"),
    ("STOPPING", {}, "", "SliceNotReady"),
)


@pytest.mark.parametrize(("state", "spec", "removing", "degraded"), NODE_ENDS)
def test_a_node_that_does_not_come_back_ends_an_active_resource(
    state: str, spec: dict[str, Any], removing: str, degraded: str
) -> None:
    resource = created(QueuedResourceState.ACTIVE, **spec)
    cloud = make_cloud_resource(resource, "ACTIVE")
    decision = decide(resource, observe(cloud, nodes=[make_node(cloud, state=state)]))
    assert decision.status.removing == removing
    assert find(decision, "Degraded").reason == degraded
    assert [event.reason for event in decision.events].count("Preempted") == int(degraded != "SliceNotReady")


def test_a_node_that_is_missing_for_long_ends_it() -> None:
    resource = noted(created(QueuedResourceState.ACTIVE), active_since=int(NOW - 119))
    cloud = make_cloud_resource(resource, "ACTIVE")
    assert not decide(resource, observe(cloud)).status.removing
    assert decide(resource, observe(cloud), now=NOW + 2).status.removing == "Preempted"


def test_an_hour_of_being_active_refills_the_budget() -> None:
    resource = created(QueuedResourceState.ACTIVE, recreate_policy={"max": 3})
    resource = noted(resource, streak=2, active_since=int(NOW - 3600))
    cloud = make_cloud_resource(resource, "SUSPENDED")
    assert decide(resource, observe(cloud)).status.operator.streak == 0


@pytest.mark.parametrize("asked", [True, False], ids=["also once it was asked for", "before it is asked for"])
def test_a_later_number_that_somebody_has_taken_is_passed_over(*, asked: bool) -> None:
    resource = noted(created() if asked else make_resource(QueuedResourceStatus()), number=2)
    foreign = make_cloud_resource(resource, "ACTIVE", node={"labels": {"stepkeeper-uid": "x"}})
    decision = decide(resource, observe(foreign))
    assert decision.status.operator.number == 3
    assert not decision.status.operator.created
