"""Test that an object neither deletes what isn't its own any more, nor forgets what is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import (
    PLACE,
    decide,
    deleting,
    kinds,
    make_cloud_resource,
    make_node,
    make_resource,
    noted,
    observe,
)
from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource
from stepkeeper_operator.queued_resources.decision import DeleteCloudResource
from stepkeeper_operator.queued_resources.naming import UID_LABEL

THEIRS = {"stepkeeper-cluster": "another", "stepkeeper-uid": "z"}


def made(state: str = "ACTIVE", number: int = 0) -> CloudQueuedResource:
    """Make what somebody has made by hand."""
    asked = make_cloud_resource(noted(make_resource(), number=number), state)
    return replace(asked, node={key: value for key, value in asked.node.items() if key != "labels"})


def record_requests(world: ResourceWorld) -> list[str]:
    asked: list[str] = []
    world.cloud.on_request = lambda verb, cloud_id: asked.append(f"{verb} {cloud_id}")
    return asked


def list_no_nodes(world: ResourceWorld) -> None:
    async def list_nothing(*_: Any) -> tuple[CloudNode, ...]:
        return ()

    world.cloud.list_nodes = list_nothing  # type: ignore[assignment, method-assign]


async def adopting(adopt: str = "team-v5e", *, hosts: bool = True) -> ResourceWorld:
    world = ResourceWorld(adopt=adopt)
    if not hosts:
        world.sync_hosts = lambda *_: None  # type: ignore[method-assign]
    world.cloud.add(made(number=int(adopt.partition("-r")[2] or 0)))
    return world


async def label(world: ResourceWorld) -> None:
    """Reconcile until the label is written, and restart the operator right then."""
    for _ in range(30):
        await world.reconcile()
        world.now += 1
        if any(UID_LABEL in node.labels for node in world.cloud.nodes.values()):
            break
    world.restart_operator()
    assert world.status.bookkeeping.adopting


async def run_all(rounds: int, *worlds: ResourceWorld) -> None:
    for _ in range(rounds):
        for world in worlds:
            await world.reconcile()
            await world.reconcile()
        for world in worlds:
            world.now += 20
        worlds[0].cloud.advance()


async def take_over(number: int) -> tuple[ResourceWorld, ResourceWorld, str]:
    """Let an object of another cluster adopt what one has made."""
    first = ResourceWorld(recreatePolicy={"backoff": {"initialSeconds": 0}})
    await first.run(8)
    if number:
        first.cloud.suspend("team-v5e")
        await first.run(14)
    cloud_id = f"team-v5e-r{number}" if number else "team-v5e"
    assert first.status.cloud_name.endswith(f"/{cloud_id}")
    keep = {"onSuspended": "Keep", "onFailed": "Keep"}
    second = ResourceWorld(
        uid="uid-2", cluster_id="another", service=first.cloud, now=first.now, recreatePolicy=keep
    )
    second.annotate(cloud_id)
    await run_all(8, first, second)
    assert second.status.bookkeeping.adopted
    assert "LetGo" in first.events
    return first, second, cloud_id


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("deleted", ["never", "while it has nodes", "afterwards"])
async def test_the_former_owner_neither_takes_back_nor_replaces_what_another_one_has_adopted(
    number: int, deleted: str
) -> None:
    first, second, cloud_id = await take_over(number)
    asked = record_requests(first)
    hosts = first.cluster.list_objects("nodes")
    assert hosts
    if deleted == "while it has nodes":
        first.delete()
    await run_all(8, first, second)
    assert first.cluster.list_objects("nodes") == hosts
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


@pytest.mark.parametrize("by", ["its deletion", "a change of its spec"])
async def test_another_one_under_the_id_of_the_adopted_one_is_not_deleted(by: str) -> None:
    world = await adopting()
    await world.run(6)
    assert world.status.bookkeeping.adopted
    asked = record_requests(world)
    world.cloud.nodes.clear()
    node = {**made().node, "labels": THEIRS}
    other = replace(made("WAITING_FOR_RESOURCES"), create_time=5000, node=node)
    world.cloud.resources[PLACE, other.id] = other
    if by == "its deletion":
        world.delete()
    else:
        world.edit(tier={"guaranteed": {}}, updatePolicy="Recreate")
    for _ in range(16):
        await world.reconcile()
        world.now += 10
    assert asked == []
    assert world.raw is None or world.condition("Accepted") == ("False", "NotOurs")


async def lose_status(world: ResourceWorld) -> None:
    await world.run(6)
    assert world.status.bookkeeping.adopted
    assert world.raw is not None
    world.cluster.put("queuedresources", {key: value for key, value in world.raw.items() if key != "status"})
    world.restart_operator()


async def begin_and_change_mind(world: ResourceWorld) -> None:
    await label(world)
    world.annotate(None)


async def look_at_short_list_without_annotation(world: ResourceWorld) -> None:
    await label(world)
    world.annotate(None)
    list_no_nodes(world)
    await world.reconcile()


async def begin_after_refused_creation(world: ResourceWorld) -> None:
    world.annotate(None)
    world.cloud.unlisted = {"team-v5e"}
    await world.run(2)
    world.cloud.unlisted = set()
    world.now += 60
    world.annotate("team-v5e")
    await label(world)


@pytest.mark.parametrize(
    ("before", "adopt", "unlisted"),
    [
        (lose_status, "team-v5e", True),
        (lose_status, "team-v5e", False),
        (lose_status, "team-v5e-r3", False),
        (label, "team-v5e", False),
        (label, "team-v5e-r3", True),
        (begin_and_change_mind, "team-v5e", False),
        (begin_and_change_mind, "team-v5e-r3", True),
        (look_at_short_list_without_annotation, "team-v5e", False),
        (look_at_short_list_without_annotation, "team-v5e-r3", True),
        (begin_after_refused_creation, "team-v5e", False),
    ],
)
async def test_what_carries_our_label_is_deleted_with_the_object_whatever_lists_leave_out(
    before: Callable[[ResourceWorld], Any], adopt: str, *, unlisted: bool
) -> None:
    world = await adopting(adopt, hosts=False)
    await before(world)
    list_no_nodes(world)
    if unlisted:
        world.cloud.unlisted = {adopt}
    asked = record_requests(world)
    world.delete()
    await run_all(8, world)
    assert asked == [f"delete {adopt}"]
    assert world.raw is None


def test_a_loss_is_no_reason_to_forget_another_one_of_ours() -> None:
    resource = deleting(QueuedResourceState.ACTIVE)
    lost, stray = (
        make_cloud_resource(resource, "ACTIVE"),
        make_cloud_resource(noted(resource, number=1), "ACTIVE"),
    )
    nodes = [make_node(lost, labels=THEIRS), make_node(stray)]
    decision = decide(resource, observe(lost, stray, nodes=nodes))
    assert kinds(decision) == [DeleteCloudResource]
    assert [action.cloud_id for action in decision.actions if isinstance(action, DeleteCloudResource)] == [
        stray.id
    ]
    assert [event.reason for event in decision.events if event.reason == "LetGo"] == ["LetGo"]


async def test_what_belongs_to_another_object_of_this_cluster_is_not_adopted() -> None:
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


async def test_what_is_on_its_way_out_is_not_adopted() -> None:
    world = await adopting()
    world.cloud.resources[PLACE, "team-v5e"] = made("DELETING")
    world.cloud.stays.add("team-v5e")
    asked = record_requests(world)
    await world.run(4)
    assert asked == []
    assert world.condition("Accepted") == ("Unknown", "Adopting")
