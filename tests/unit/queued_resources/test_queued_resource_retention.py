"""Test what a retained resource leaves: machines, and nodes that take pods again."""

from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import (
    PLACE,
    decide,
    deleting,
    make_cloud_resource,
    noted,
    observe,
    with_status,
)
from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource_status import CloudOperation, QueuedResourceState
from stepkeeper_operator.queued_resources.decision import SetFinalizer, Uncordon
from stepkeeper_operator.queued_resources.observed import Member



def unschedulable(world: ResourceWorld) -> dict[str, bool]:
    nodes = world.cluster.list_objects("nodes")
    return {raw["metadata"]["name"]: raw["spec"].get("unschedulable", False) for raw in nodes}


async def draining(**spec: Any) -> ResourceWorld:
    """Make one of two slices that is deleted while a pod saves; somebody else had cordoned one node before."""
    world = ResourceWorld(node={"count": 2}, **spec)
    await world.run(12)
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
    theirs = world.cluster.objects["nodes", None, "team-v5e-1-w0"]
    world.cluster.put("nodes", {**theirs, "spec": {"unschedulable": True}})
    world.add_pod("team-v5e-0-w0")
    return world


async def test_retain_in_the_midst_of_a_deletion_uncordons_what_we_cordoned() -> None:
    world = await draining()
    world.delete()
    await world.run(1)
    assert unschedulable(world) == {"team-v5e-0-w0": True, "team-v5e-1-w0": True}
    world.edit(deletionPolicy="Retain")
    await world.run(3)
    assert world.raw is None
    assert unschedulable(world) == {"team-v5e-0-w0": False, "team-v5e-1-w0": True}
    node = world.cluster.objects["nodes", None, "team-v5e-0-w0"]
    assert not node["metadata"].get("annotations")
    assert (PLACE, "team-v5e") in world.cloud.resources


@pytest.mark.parametrize("restart", [True, False], ids=["restarted", "not restarted"])
async def test_a_retained_object_that_is_deleted_in_the_midst_of_a_drain_leaves_no_cordon(
    *, restart: bool
) -> None:
    world = await draining(deletion_policy="Retain", update_policy="Recreate")
    world.edit(node={"count": 2, "acceleratorType": "v5litepod-4", "runtimeVersion": "x"})
    await world.run(2)
    assert unschedulable(world)["team-v5e-0-w0"]
    world.delete()
    if restart:
        world.restart_operator()
    await world.run(2)
    assert world.raw is None
    assert unschedulable(world) == {"team-v5e-0-w0": False, "team-v5e-1-w0": True}


@pytest.mark.parametrize("write", range(3))
async def test_an_operator_that_is_killed_on_the_way_leaves_no_cordon(write: int) -> None:
    world = await draining()
    world.delete()
    await world.run(1)
    world.edit(deletionPolicy="Retain")
    world.kill_at, world.kill_before = write, False
    await world.run(3)
    assert world.raw is None
    assert unschedulable(world) == {"team-v5e-0-w0": False, "team-v5e-1-w0": True}




