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
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.queued_resources.decision import DeleteCloudResource
from stepkeeper_operator.queued_resources.settings import CloudSettings


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
async def test_what_somebody_else_takes_over_is_not_touched_until_a_person_acts(
    *, deleted: bool, adopted: bool
) -> None:
    world = await adopting() if adopted else ResourceWorld()
    await world.run(14)
    requests = record_requests(world)
    take_nodes(world)
    if deleted:
        world.delete()
    await world.run(20)
    assert requests == []
    assert owners(world) == {"z"}
    assert world.events.count("OwnedByOther") == 1
    if deleted:
        assert world.raw is None
        return
    assert world.condition("Accepted") == ("False", "OwnedByOther")
    assert "z" in world.message("Accepted")
    world.annotate(None)
    await world.run(4)
    world.annotate("team-v5e")
    await world.run(8)
    assert owners(world) == {"uid-1"}
    assert world.condition("Accepted") == ("True", "Accepted")


@pytest.mark.parametrize("retained", [True, False])
async def test_what_is_lost_holds_no_deletion_up_and_is_not_said_to_be_retained(*, retained: bool) -> None:
    world = await active(deletionPolicy="Retain" if retained else "Delete")
    take_nodes(world)
    await world.run(6)
    world.cloud.inject_error("ListNodes", "UNAVAILABLE", None, message="down")
    if not retained:
        world.delete()
        await world.run(2)
        assert world.raw is not None, "it waits for an error that passes"
        assert not [raw for raw in world.cluster.list_objects("nodes") if raw["spec"].get("unschedulable")]
    world.cloud.clear_faults()
    world.cloud.inject_error("ListNodes", "PERMISSION_DENIED", None, message="denied")
    world.delete()
    await world.run(4)
    assert world.raw is None
    assert "Retained" not in world.events
    assert world.events.count("OwnedByOther") == (1 if retained else 2), (
        "at the loss, and as it lets go of it"
    )


async def test_another_resource_can_be_adopted_after_a_loss() -> None:
    world = await active()
    take_nodes(world)
    await world.run(4)
    asked = record_requests(world)
    world.cloud.add(made(cloud_id="team-v5e-r1"))
    world.annotate("team-v5e-r1")
    await world.run(10)
    assert world.status.cloud_name.endswith("/team-v5e-r1")
    assert world.condition("Accepted") == ("True", "Accepted")
    assert not [each for each in asked if not each.startswith("label team-v5e-r1")]


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
    assert world.condition("Accepted") == ("False", "OwnedByOther")


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
    assert world.status.operator.adopted is adopted
    asked = record_requests(world)
    take(world)
    theirs = dict(world.cloud.resources)
    if by == "its own deletion":
        world.delete()
    else:
        world.edit(slices={**world.resource.to_raw()["spec"]["slices"], "topology": "2x2"})
    await world.run(12)
    assert not [each for each in asked if each.startswith("delete")]
    assert theirs.items() <= world.cloud.resources.items()
    assert (world.raw is None) is (by == "its own deletion")
    if world.raw is not None:
        assert world.condition("Accepted") == ("False", "OwnedByOther")
        assert world.status.error is None


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("deleted", [True, False], ids=["and is deleted", "and stays"])
async def test_the_former_owner_neither_takes_back_nor_replaces_what_another_cluster_has_adopted(
    number: int, *, deleted: bool
) -> None:
    first = await active(recreatePolicy={"backoff": {"initialSeconds": 0}})
    if number:
        first.cloud.suspend("team-v5e")
        await first.run(14)
    cloud_id = f"team-v5e-r{number}" if number else "team-v5e"
    second = ResourceWorld(uid="uid-2", cluster_id="another", service=first.cloud, now=first.now)
    second.annotate(cloud_id)
    await run_all(8, first, second)
    assert second.status.operator.adopted
    asked = record_requests(first)
    hosts = first.hosts
    assert hosts
    if deleted:
        first.delete()
    await run_all(8, first, second)
    assert first.hosts == hosts
    assert second.status.state is QueuedResourceState.ACTIVE
    assert asked == []
    assert (first.raw is None) is deleted
    if not deleted:
        assert first.condition("Accepted") == ("False", "OwnedByOther")
        first.sync_hosts([])
        second.delete()
        await run_all(20, first, second)
        assert asked[:2] == [f"delete {cloud_id}", f"create {cloud_id}"]


@pytest.mark.parametrize("ends", ["suspended", "preempted"])
async def test_what_another_cluster_has_adopted_is_not_deleted_once_it_has_no_nodes(ends: str) -> None:
    first = await active()
    keep: dict[str, Any] = {"recreatePolicy": {"onSuspended": "Keep"}}
    second = ResourceWorld(uid="uid-2", cluster_id="another", service=first.cloud, now=first.now, **keep)
    second.annotate("team-v5e")
    await run_all(8, first, second)
    asked = record_requests(first)
    if ends == "suspended":
        first.cloud.suspend("team-v5e")
    else:
        first.cloud.nodes.clear()
    await run_all(20, first, second)
    assert asked == []
    assert first.condition("Accepted") == ("False", "OwnedByOther")
    assert "was taken over by another object" in first.message("Accepted")
    first.delete()
    await run_all(10, first, second)
    assert asked == []
    assert first.raw is None


async def test_what_gets_this_objects_label_back_is_its_own_again_with_its_policies() -> None:
    world = await active(recreatePolicy={"backoff": {"initialSeconds": 0}})
    before = dict(world.cloud.nodes)
    take_nodes(world)
    await world.run(4)
    assert world.condition("Accepted") == ("False", "OwnedByOther")
    world.cloud.nodes.update(before)
    await world.run(4)
    assert world.condition("Accepted") == ("True", "Accepted")
    world.cloud.suspend("team-v5e")
    await world.run(30)
    assert world.ours == ["team-v5e-r1"]


async def test_what_another_object_takes_over_during_a_drain_is_uncordoned_and_left_alone() -> None:
    world = await active(updatePolicy="Recreate")
    world.add_pod(world.hosts[0])
    world.edit(slices={**world.resource.to_raw()["spec"]["slices"], "topology": "2x2"})
    await world.run(1)
    assert [raw["spec"]["unschedulable"] for raw in world.cluster.list_objects("nodes")] == [True]
    asked = record_requests(world)
    take_nodes(world)
    await world.run(8)
    assert asked == []
    assert not [raw for raw in world.cluster.list_objects("nodes") if raw["spec"].get("unschedulable")]
    assert world.condition("Accepted") == ("False", "OwnedByOther")


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


@pytest.mark.parametrize("retained", [True, False])
async def test_what_belongs_to_an_object_of_another_name_in_this_cluster_is_not_adopted(
    *, retained: bool
) -> None:
    owner = ResourceWorld(namespace="team", name="v5-e", deletionPolicy="Retain")
    await owner.run(6)
    if retained:
        owner.delete()
        await owner.run(2)
        assert owner.raw is None
    other = ResourceWorld(
        namespace="team-v5", name="e", uid="uid-2", service=owner.cloud, now=owner.now, adopt="team-v5-e"
    )
    asked = record_requests(owner)
    await run_all(6, owner, other)
    assert asked == []
    assert other.condition("Accepted") == ("False", "OwnedByOther")
    assert "the label of QueuedResource team/v5-e of this cluster" in other.message("Accepted")
    assert "Choose another metadata.name" in other.message("Accepted")
