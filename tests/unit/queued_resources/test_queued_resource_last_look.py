"""Test what stands between the decision to delete a cloud resource and the request: the labels it has by then."""

from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import make_cloud_resource, make_resource
from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.queued_resources.settings import CloudSettings

THEIRS = {
    "stepkeeper-cluster": "another",
    "stepkeeper-namespace": "x",
    "stepkeeper-name": "y",
    "stepkeeper-uid": "z",
}


async def settle(*, adopted: bool = False, **spec: Any) -> ResourceWorld:
    """Bring a resource to the state in which the cloud is looked at once a minute, without hosts in the cluster."""
    world = ResourceWorld(
        settings=CloudSettings(poll_active_s=60), adopt="team-v5e" if adopted else None, **spec
    )
    world.sync_hosts = lambda *_: None  # type: ignore[method-assign]
    if adopted:
        cloud = make_cloud_resource(make_resource(**spec), "ACTIVE")
        node = {key: value for key, value in cloud.node.items() if key not in {"labels", "metadata"}}
        world.cloud.add(replace(cloud, node=node))
    await world.run(40)
    await world.reconcile()
    assert world.status.state is QueuedResourceState.ACTIVE
    assert world.status.bookkeeping.adopted is adopted
    return world


def take_nodes(world: ResourceWorld) -> None:
    """Label the nodes as another cluster would."""
    for key, node in world.cloud.nodes.items():
        world.cloud.nodes[key] = replace(node, labels=THEIRS)


def take_name(world: ResourceWorld) -> None:
    """Delete the resource, and make another one of that name, as another cluster would."""
    for key, found in world.cloud.resources.items():
        world.cloud.resources[key] = replace(found, node={**found.node, "labels": THEIRS})
    take_nodes(world)


@pytest.mark.parametrize("adopted", [True, False])
@pytest.mark.parametrize("by_nodes", [True, False])
@pytest.mark.parametrize("by", ["its own deletion", "a change of its spec"])
async def test_what_another_cluster_has_taken_since_the_last_list_is_not_deleted(
    *, adopted: bool, by_nodes: bool, by: str
) -> None:
    world = await settle(adopted=adopted, update_policy="Recreate")
    asked: list[str] = []
    world.cloud.on_request = lambda verb, _: asked.append(verb)
    (take_nodes if by_nodes else take_name)(world)
    theirs = dict(world.cloud.resources)
    if by == "its own deletion":
        world.delete()
    else:
        world.edit(node={**world.resource.to_raw()["spec"]["node"], "acceleratorType": "v5litepod-4"})
    await world.run(12)
    assert "delete" not in asked
    assert theirs.items() <= world.cloud.resources.items()
    assert "LetGo" in world.events or not adopted
    assert (world.raw is None) is (by == "its own deletion")
    if world.raw is not None:
        assert world.status.error is None


async def test_a_last_look_that_fails_is_taken_again_before_anything_is_deleted() -> None:
    world = await settle()
    asked: list[str] = []
    world.cloud.on_request = lambda verb, _: asked.append(verb)
    world.cloud.inject_error("GetQueuedResource", "UNAVAILABLE", message="down")
    world.delete()
    await world.reconcile()
    assert asked == []
    await world.run(8)
    assert asked == ["delete"]
    assert world.raw is None


@pytest.mark.parametrize("by", ["its own deletion", "its end"])
async def test_a_refused_cordon_is_told_and_holds_no_deletion_up(by: str) -> None:
    world = ResourceWorld()
    await world.run(8)
    world.cluster.refusals["patch", "nodes"] = ApiError(403, "webhook nodes.corp says no")
    if by == "its own deletion":
        world.delete()
    else:
        world.cloud.fail("team-v5e", "INTERNAL", "it broke")
        world.now += 30  # a list from before isn't taken any more
    for _ in range(3):
        await world.reconcile()
    assert world.cloud.resources[next(iter(world.cloud.resources))].state == "DELETING"
    assert world.condition("Degraded") == ("True", "CordonRefused")
    assert world.events.count("CordonRefused") == 1
    degraded = next(c for c in world.status.conditions if c.type == "Degraded")
    assert "webhook nodes.corp says no" in degraded.message
    await world.run(20)
    assert "team-v5e" not in world.ours
    assert (world.raw is None) is (by == "its own deletion")
    if world.raw is not None:
        assert world.condition("Degraded") == ("False", "AsExpected")
