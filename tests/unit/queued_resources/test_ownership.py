"""Test that an object neither deletes what isn't its own any more, nor forgets what is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import decide, deleting, make_cloud_resource, make_node, noted, observe
from fake_cluster.resource_owners import (
    OTHERS,
    THEIRS,
    adopting,
    beside,
    made,
    owners,
    record_requests,
    run_all,
    take_nodes,
    tell,
)
from fake_cluster.resource_world import ResourceWorld, active
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.queued_resources.decision import DeleteCloudResource
from stepkeeper_operator.queued_resources.settings import CloudSettings

AT_ONCE: dict[str, Any] = {"backoff": {"initialSeconds": 0}}


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
    await tell(
        world, "take, delete, run 20, gone" if deleted else f"take, run 20, {OTHERS}, message Accepted z"
    )
    assert (requests, owners(world), world.events.count("OwnedByOther")) == ([], {"z"}, 1)
    if not deleted:
        await tell(world, "annotate, run 4, annotate team-v5e, run 8, condition Accepted True/Accepted")
        assert owners(world) == {"uid-1"}


def count_cordons(world: ResourceWorld, count: str) -> None:
    nodes = world.cluster.list_objects("nodes")
    assert len([raw for raw in nodes if raw["spec"].get("unschedulable")]) == int(count)


@pytest.mark.parametrize("retained", [True, False])
async def test_what_is_lost_holds_no_deletion_up_and_is_not_said_to_be_retained(*, retained: bool) -> None:
    world = await active(deletionPolicy="Retain" if retained else "Delete")
    await tell(world, "take, run 6, fail ListNodes UNAVAILABLE")
    if not retained:  # it waits for an error that passes
        await tell(world, "delete, run 2, exists, cordons 0", cordons=count_cordons)
    await tell(world, "recover, fail ListNodes PERMISSION_DENIED, delete, run 4, gone, events Retained 0")
    assert world.events.count("OwnedByOther") == (1 if retained else 2), "at the loss, and as it lets go"


async def test_another_resource_can_be_adopted_after_a_loss() -> None:
    world = await tell(await active(), "take, run 4")
    asked = record_requests(world)
    world.cloud.add(made(cloud_id="team-v5e-r1"))
    await tell(world, "annotate team-v5e-r1, run 10, condition Accepted True/Accepted")
    assert world.status.cloud_name.endswith("/team-v5e-r1")
    assert not [each for each in asked if not each.startswith("label team-v5e-r1")]


async def test_what_another_cluster_labels_just_before_our_label_is_written_stays_theirs() -> None:
    world = beside()
    get_node = world.cloud.get_node

    async def get_late(*args: Any) -> Any:
        take_nodes(world)
        return await get_node(*args)

    world.cloud.get_node = get_late  # type: ignore[assignment, method-assign]
    requests = record_requests(world)
    await tell(world, f"run 8, {OTHERS}")
    assert requests == []


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
    await tell(world, "gone" if by == "its own deletion" else OTHERS)
    assert world.raw is None or world.status.error is None


async def adopt_elsewhere(
    first: ResourceWorld, cloud_id: str, **spec: Any
) -> tuple[ResourceWorld, list[str]]:
    """Let another cluster adopt it. Return that one, and what is asked of the cloud from now on."""
    second = ResourceWorld(uid="uid-2", cluster_id="another", service=first.cloud, now=first.now, **spec)
    second.annotate(cloud_id)
    await run_all(8, first, second)
    assert second.status.operator.adopted
    return second, record_requests(first)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("deleted", [True, False], ids=["and is deleted", "and stays"])
async def test_the_former_owner_neither_takes_back_nor_replaces_what_another_cluster_has_adopted(
    number: int, *, deleted: bool
) -> None:
    first = await active(recreatePolicy=AT_ONCE)
    if number:
        await tell(first, "suspend, run 14")
    cloud_id = f"team-v5e-r{number}" if number else "team-v5e"
    second, asked = await adopt_elsewhere(first, cloud_id)
    hosts = first.hosts
    assert hosts
    if deleted:
        first.delete()
    await run_all(8, first, second)
    assert (first.hosts, asked) == (hosts, [])
    await tell(second, "state Active")
    await tell(first, "gone" if deleted else OTHERS)
    if not deleted:
        first.sync_hosts([])
        second.delete()
        await run_all(20, first, second)
        assert asked[:2] == [f"delete {cloud_id}", f"create {cloud_id}"]


@pytest.mark.parametrize("ends", ["suspended", "preempted"])
async def test_what_another_cluster_has_adopted_is_not_deleted_once_it_has_no_nodes(ends: str) -> None:
    first = await active()
    second, asked = await adopt_elsewhere(first, "team-v5e", recreatePolicy={"onSuspended": "Keep"})
    if ends == "suspended":
        first.cloud.suspend("team-v5e")
    else:
        first.cloud.nodes.clear()
    await run_all(20, first, second)
    await tell(first, f"{OTHERS}, message Accepted was taken over by another object, delete")
    await run_all(10, first, second)
    assert (asked, first.raw) == ([], None)


async def test_what_gets_this_objects_label_back_is_its_own_again_with_its_policies() -> None:
    world = await active(recreatePolicy=AT_ONCE)
    before = dict(world.cloud.nodes)
    await tell(world, f"take, run 4, {OTHERS}")
    world.cloud.nodes.update(before)
    await tell(world, "run 4, condition Accepted True/Accepted, suspend, run 30, ours team-v5e-r1")


async def test_what_another_object_takes_over_during_a_drain_is_uncordoned_and_left_alone() -> None:
    world = await active(updatePolicy="Recreate")
    world.add_pod(world.hosts[0])
    world.edit(slices={**world.resource.to_raw()["spec"]["slices"], "topology": "2x2"})
    await tell(world, "run 1, cordons 1", cordons=count_cordons)
    asked = record_requests(world)
    await tell(world, f"take, run 8, cordons 0, {OTHERS}", cordons=count_cordons)
    assert asked == []


def test_a_loss_is_no_reason_to_forget_another_one_of_ours() -> None:
    resource = deleting(QueuedResourceState.ACTIVE)
    lost = make_cloud_resource(resource, "ACTIVE")
    stray = make_cloud_resource(noted(resource, number=1), "ACTIVE")
    nodes = [make_node(lost, labels=THEIRS), make_node(stray)]
    (action,) = decide(resource, observe(lost, stray, nodes=nodes)).actions
    assert isinstance(action, DeleteCloudResource)
    assert action.cloud_id == stray.id


@pytest.mark.parametrize("retained", [True, False])
async def test_what_belongs_to_an_object_of_another_name_in_this_cluster_is_not_adopted(
    *, retained: bool
) -> None:
    owner = ResourceWorld(namespace="team", name="v5-e", deletionPolicy="Retain")
    await tell(owner, "run 6, delete, run 2, gone" if retained else "run 6")
    place: dict[str, Any] = {"namespace": "team-v5", "name": "e", "uid": "uid-2", "adopt": "team-v5-e"}
    other = ResourceWorld(service=owner.cloud, now=owner.now, **place)
    asked = record_requests(owner)
    await run_all(6, owner, other)
    assert asked == []
    await tell(other, f"{OTHERS}, message Accepted the label of QueuedResource team/v5-e of this cluster")
    assert "Choose another metadata.name" in other.message("Accepted")
