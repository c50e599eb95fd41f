"""Test that lack of quota is tried again ever more slowly, however the cloud tells of it."""

from fake_cluster.queued_resources import (
    after,
    created,
    decide,
    kinds,
    make_cloud_resource,
    make_node,
    make_resource,
    noted,
    observe,
)
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import CloudOperationState, CloudTPUError, ErrorKind
from stepkeeper_operator.queued_resources.decision import CreateCloudResource
from stepkeeper_operator.queued_resources.observed import Outcome, Verb

EXPECTED_WAITS_S = [300, 600, 1200, 1800, 1800]
NO_QUOTA = CloudTPUError(ErrorKind.QUOTA, "RESOURCE_EXHAUSTED", "no quota")


def answer_creation(resource: QueuedResource, now: float) -> QueuedResource:
    """Ask for it, and let the cloud take the request."""
    asked = decide(resource, observe(), now=now)
    assert kinds(asked) == [CreateCloudResource]
    resource = after(resource, asked)
    outcome = Outcome(verb=Verb.CREATE, at=now, operation="op")
    return after(resource, decide(resource, observe(outcome=outcome), now=now))


def fail_by_state(resource: QueuedResource, now: float) -> QueuedResource:
    cloud = make_cloud_resource(resource, "FAILED", error_code="RESOURCE_EXHAUSTED", error_message="no quota")
    done = CloudOperationState(name="op", done=True)
    resource = after(resource, decide(resource, observe(cloud, operation=done), now=now))
    return after(resource, decide(resource, observe(pods=()), now=now))


def fail_by_operation(resource: QueuedResource, now: float) -> QueuedResource:
    failed = CloudOperationState(name="op", done=True, error=NO_QUOTA)
    return after(resource, decide(resource, observe(operation=failed), now=now))


def wait_of(resource: QueuedResource, now: float) -> float:
    not_before = resource.status.bookkeeping.not_before
    assert not_before is not None
    return not_before - now


def test_a_lack_that_the_state_tells_of_is_tried_again_ever_more_slowly() -> None:
    resource, now, waits = make_resource(), 10_000.0, []
    for _ in EXPECTED_WAITS_S:
        resource = fail_by_state(answer_creation(resource, now), now)
        waits.append(wait_of(resource, now))
        now += waits[-1]
    assert waits == EXPECTED_WAITS_S


def test_a_lack_that_the_operation_tells_of_is_tried_again_ever_more_slowly() -> None:
    resource, now, waits = make_resource(), 10_000.0, []
    for _ in EXPECTED_WAITS_S:
        resource = fail_by_operation(answer_creation(resource, now), now)
        waits.append(wait_of(resource, now))
        now += waits[-1]
    assert waits == EXPECTED_WAITS_S


def test_the_two_ways_to_tell_it_are_counted_together() -> None:
    now = 10_000.0
    resource = fail_by_state(answer_creation(make_resource(), now), now)
    now += 300
    resource = fail_by_operation(answer_creation(resource, now), now)
    assert wait_of(resource, now) == 600


def test_an_active_resource_starts_the_count_anew() -> None:
    resource = noted(created(QueuedResourceState.PROVISIONING), quota_failures=3)
    cloud = make_cloud_resource(resource, "ACTIVE")
    resource = after(resource, decide(resource, observe(cloud, nodes=[make_node(cloud)])))
    assert resource.status.bookkeeping.quota_failures == 0


def test_a_smaller_wish_is_tried_at_once_after_a_lack_that_the_state_told_of() -> None:
    resource = fail_by_state(answer_creation(make_resource(), 10_000.0), 10_000.0)
    assert resource.status.state is QueuedResourceState.PENDING
    assert decide(resource, observe(), now=10_001.0).actions == ()
    smaller = make_resource(resource.status, node={"acceleratorType": "v5litepod-4"})
    assert kinds(decide(smaller, observe(), now=10_001.0)) == [CreateCloudResource]


def test_what_failed_for_lack_of_quota_keeps_the_number_of_its_tries_over_a_restart() -> None:
    resource = fail_by_state(answer_creation(created(), 10_000.0), 10_000.0)
    read = QueuedResource.model_validate(resource.to_raw())
    assert read.status == resource.status
