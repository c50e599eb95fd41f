"""Test that an operation which nobody can read holds nothing up: what exists, or doesn't, tells what became of it."""

import pytest

from fake_cluster.queued_resources import (
    created,
    decide,
    deleting,
    make_cloud_resource,
    make_node,
    noted,
    observe,
    with_status,
)
from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource_status import CloudOperation, QueuedResourceState
from stepkeeper_operator.queued_resources.settings import CloudSettings

CREATION = CloudOperation(name="op", verb="Create", start_time=0)


def unreadable_operations() -> ResourceWorld:
    world = ResourceWorld(settings=CloudSettings(poll_active_s=100))
    world.cloud.inject_error("GetOperation", "PERMISSION_DENIED", None, message="may not read operations")
    return world


async def test_the_cloud_is_listed_at_the_idle_pace_though_no_operation_can_be_read() -> None:
    world = unreadable_operations()
    await world.run(40)
    assert world.status.state is QueuedResourceState.ACTIVE
    assert world.status.operation is None
    lists_before, ends_at = world.cloud.count("ListQueuedResources"), world.now + 1000
    while world.now < ends_at:
        await world.reconcile()
        world.now += 5
    assert world.cloud.count("ListQueuedResources") - lists_before <= 12


async def test_a_deletion_ends_with_the_resource_though_no_operation_can_be_read() -> None:
    world = unreadable_operations()
    await world.run(40)
    world.delete()
    await world.run(8)
    assert world.raw is None
    assert not world.cloud.resources


@pytest.mark.parametrize(("state", "over"), [("CREATING", False), ("ACCEPTED", True), ("ACTIVE", True)])
def test_a_creation_is_over_once_the_resource_is_further(state: str, *, over: bool) -> None:
    resource = with_status(created(QueuedResourceState.CREATING), operation=CREATION)
    cloud = make_cloud_resource(resource, state)
    decision = decide(resource, observe(cloud, nodes=[make_node(cloud)]), now=60.0)
    assert (decision.status.operation is None) is over


def test_a_creation_that_may_still_come_keeps_a_deletion_waiting() -> None:
    resource = noted(with_status(deleting(), operation=CREATION), removing="Deleted", removing_since=0)
    decision = decide(resource, observe(pods=()), now=60.0)
    assert decision.actions == ()
    assert decision.status.operation == CREATION
