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




