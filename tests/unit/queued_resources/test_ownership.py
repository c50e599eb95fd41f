"""Test that an object neither deletes what isn't its own any more, nor forgets what is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import (
    decide,
    deleting,
    make_cloud_resource,
    make_node,
    noted,
    observe,
)
from fake_cluster.resource_owners import THEIRS, adopting, beside, made, owners, record_requests, run_all
from fake_cluster.resource_world import ResourceWorld, active
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.queued_resources.decide.adoption import let_go
from stepkeeper_operator.queued_resources.decision import DeleteCloudResource
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.queued_resources.sight import Presence, Sight


def take_nodes(world: ResourceWorld) -> None:
    """Label the nodes as another cluster would that adopts it."""
    for key, node in world.cloud.nodes.items():
        world.cloud.nodes[key] = replace(node, labels=THEIRS)


def take_name(world: ResourceWorld) -> None:
    """Delete it and make another one of that name, as another cluster would."""
    for key, found in world.cloud.resources.items():
        node = {**found.node, "labels": THEIRS}
        world.cloud.resources[key] = replace(found, create_time=5000, node=node)
    take_nodes(world)


@pytest.mark.parametrize("adopted", [True, False], ids=["adopted", "made"])
@pytest.mark.parametrize("deleted", [True, False], ids=["and deleted", "and kept"])
async def test_what_somebody_else_takes_over_is_let_go_untouched(*, deleted: bool, adopted: bool) -> None:
    world = await adopting() if adopted else ResourceWorld()
    await world.run(14)
    requests = record_requests(world)
    take_nodes(world)
    if deleted:
        world.delete()
    await world.run(20)
    assert requests == []
    assert owners(world) == {"z"}
    assert world.events.count("LetGo") == 1
    if deleted:
        assert world.raw is None
        return
    assert world.condition("Accepted") == ("False", "NotOurs")
    world.annotate(None)
    await world.run(4)
    world.annotate("team-v5e")
    await world.run(8)
    assert owners(world) == {"uid-1"}
    assert world.condition("Accepted") == ("True", "Accepted")


async def test_what_was_let_go_stays_untouched_after_another_one_was_adopted() -> None:
    world = await active()
    take_nodes(world)
    await world.run(4)
    assert "LetGo" in world.events
    world.cloud.add(made(cloud_id="team-v5e-r1"))
    world.annotate("team-v5e-r1")
    await world.run(10)
    assert world.status.cloud_name.endswith("/team-v5e-r1")
    requests = record_requests(world)
    for key, node in list(world.cloud.nodes.items()):
        if node.labels == THEIRS:  # its request still names this object
            del world.cloud.nodes[key]
    await world.run(10)
    assert requests == []
    assert world.condition("Degraded") == ("False", "AsExpected")
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert [found.id for found in world.cloud.resources.values()] == ["team-v5e"]


def test_the_last_ones_that_were_let_go_are_known() -> None:
    resource = noted(deleting(QueuedResourceState.ACTIVE), created=True, adopted=True)
    found = make_cloud_resource(resource, "ACTIVE")
    status = resource.status
    for at in range(1000):
        sight = Sight(presence=Presence.FOREIGN, resource=replace(found, create_time=at))
        status = let_go(let_go(status, sight), sight)
    known = status.bookkeeping.released
    assert known == tuple(f"team-v5e@{at}" for at in range(1000 - len(known), 1000))
    assert QueuedResourceStatus.model_validate(status.to_raw()).bookkeeping.released == known


async def test_what_another_cluster_labels_just_before_our_label_is_written_stays_theirs() -> None:
    world = beside()
    get_node = world.cloud.get_node

    async def get_late(*args: Any) -> Any:
        take_nodes(world)
        return await get_node(*args)

    world.cloud.get_node = get_late  # type: ignore[assignment, method-assign]
    requests = record_requests(world)
    await world.run(8)
    assert requests == []
    assert world.condition("Accepted") == ("False", "NotOurs")


@pytest.mark.parametrize("adopted", [True, False])
@pytest.mark.parametrize("take", [take_nodes, take_name])
@pytest.mark.parametrize("by", ["its own deletion", "a change of its spec"])
async def test_what_another_cluster_has_taken_since_the_last_list_is_not_deleted(
    by: str, take: Callable[[ResourceWorld], None], *, adopted: bool
) -> None:
    options: dict[str, Any] = {"settings": CloudSettings(poll_active_s=60), "update_policy": "Recreate"}
    world = beside(**options) if adopted else ResourceWorld(**options)
    world.sync_hosts = lambda *_: None  # type: ignore[method-assign]
    await world.run(40)
    await world.reconcile()
    assert world.status.bookkeeping.adopted is adopted
    asked = record_requests(world)
    take(world)
    theirs = dict(world.cloud.resources)
    if by == "its own deletion":
        world.delete()
    else:
        world.edit(node={**world.resource.to_raw()["spec"]["node"], "acceleratorType": "v5litepod-4"})
    await world.run(12)
    assert not [each for each in asked if each.startswith("delete")]
    assert theirs.items() <= world.cloud.resources.items()
    assert "LetGo" in world.events or not adopted
    assert (world.raw is None) is (by == "its own deletion")
    if world.raw is not None:
        assert world.status.error is None


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("deleted", ["never", "while it has nodes", "afterwards"])
async def test_the_former_owner_neither_takes_back_nor_replaces_what_another_cluster_has_adopted(
    number: int, deleted: str
) -> None:
    first = await active(recreatePolicy={"backoff": {"initialSeconds": 0}})
    if number:
        first.cloud.suspend("team-v5e")
        await first.run(14)
    cloud_id = f"team-v5e-r{number}" if number else "team-v5e"
    kept = {"onSuspended": "Keep", "onFailed": "Keep"}
    second = ResourceWorld(
        uid="uid-2", cluster_id="another", service=first.cloud, now=first.now, recreatePolicy=kept
    )
    second.annotate(cloud_id)
    await run_all(8, first, second)
    assert second.status.bookkeeping.adopted
    assert "LetGo" in first.events
    asked = record_requests(first)
    hosts = first.hosts
    assert hosts
    if deleted == "while it has nodes":
        first.delete()
    await run_all(8, first, second)
    assert first.hosts == hosts
    first.cloud.suspend(cloud_id)
    first.cloud.nodes.clear()
    if deleted == "afterwards":
        first.delete()
    await run_all(8, first, second)
    assert asked == []
    assert second.status.state is QueuedResourceState.SUSPENDED
    assert (first.raw is None) is (deleted != "never")
    if deleted == "never":
        assert first.condition("Accepted") == ("False", "NotOurs")
        first.sync_hosts([])
        second.delete()
        await run_all(20, first, second)
        assert asked[:2] == [f"delete {cloud_id}", f"create {cloud_id}"]


def test_a_loss_is_no_reason_to_forget_another_one_of_ours() -> None:
    resource = deleting(QueuedResourceState.ACTIVE)
    lost = make_cloud_resource(resource, "ACTIVE")
    stray = make_cloud_resource(noted(resource, number=1), "ACTIVE")
    decision = decide(
        resource, observe(lost, stray, nodes=[make_node(lost, labels=THEIRS), make_node(stray)])
    )
    (action,) = decision.actions
    assert isinstance(action, DeleteCloudResource)
    assert action.cloud_id == stray.id
    assert [event.reason for event in decision.events if event.reason == "LetGo"] == ["LetGo"]


async def test_what_belongs_to_another_object_of_this_cluster_is_not_adopted_before_it_is_let_go() -> None:
    owner = ResourceWorld(namespace="team", name="v5-e")
    await owner.run(6)
    other = ResourceWorld(
        namespace="team-v5", name="e", uid="uid-2", service=owner.cloud, now=owner.now, adopt="team-v5-e"
    )
    assert owner.raw is not None
    other.cluster.put("queuedresources", owner.raw)
    asked = record_requests(owner)
    await run_all(6, owner, other)
    assert asked == []
    assert other.condition("Accepted") == ("False", "NotOurs")
    assert any("belongs to QueuedResource team/v5-e of" in each.message for each in other.status.conditions)
    owner.edit(deletionPolicy="Retain")
    owner.delete()
    await run_all(2, owner)
    other.cluster.remove("queuedresources", "team", "v5-e")
    await run_all(8, owner, other)
    assert other.status.bookkeeping.adopted
