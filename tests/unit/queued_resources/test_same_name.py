"""Test objects that want one name in the cloud: one after the other, and from two namespaces at once."""

import pytest

from fake_cluster.queued_resources import PLACE
from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion
from stepkeeper_operator.cloud_tpu.naming import UID_LABEL
from stepkeeper_operator.labels import QUEUED_RESOURCE_UID_LABEL

ACTIVE = QueuedResourceState.ACTIVE


async def delete_and_apply(world: ResourceWorld, *, rounds: int) -> None:
    """Delete the object at some time, and apply it again the moment that it is gone."""
    await world.run(rounds)
    world.delete()
    for _ in range(200):
        if world.raw is None:
            break
        await world.reconcile()
        world.step()
    world.make_object("uid-2")


@pytest.mark.parametrize(("rounds", "n_refusals"), [(0, 0), (2, 3), (3, 0), (8, 3)])
async def test_an_object_that_is_made_again_at_once_has_the_name_and_machines_of_its_own(
    rounds: int, n_refusals: int
) -> None:
    """The API may say for a while that the name is taken."""

    world = ResourceWorld()
    await delete_and_apply(world, rounds=rounds)
    for _ in range(n_refusals):
        world.cloud.inject_error("CreateQueuedResource", "ALREADY_EXISTS", message="team-v5e exists")
    if n_refusals:
        for _ in range(3):
            await world.reconcile()
        assert world.condition("Accepted") == ("False", "AlreadyExists")
        assert "The name of a deletion just now is free again soon" in world.message("Accepted")
    await world.run(12)
    assert world.status.state is ACTIVE
    assert world.ours == list_ids(world) == ["team-v5e"]
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
    labels = [raw["metadata"]["labels"] for raw in world.cluster.list_objects("nodes")]
    assert {each[QUEUED_RESOURCE_UID_LABEL] for each in labels} == {"uid-2"}
    assert world.status.recreations == 0


def list_ids(world: ResourceWorld) -> list[str]:
    return [cloud_id for _, cloud_id in world.cloud.resources]


async def test_a_deletion_that_comes_late_and_hits_the_next_of_the_name_is_told_and_made_good() -> None:
    """The API withdraws no request: one of the earlier object's may be carried out after everything is gone."""

    world = ResourceWorld()
    await delete_and_apply(world, rounds=8)
    await world.run(8)
    assert world.status.state is ACTIVE
    await world.cloud.delete_queued_resource(PLACE, "team-v5e", request_id="", version=ApiVersion.V2)
    await world.run(12)
    assert world.ours == list_ids(world) == ["team-v5e-r1"]
    assert world.status.state is ACTIVE
    assert {"Vanished", "Preempted"} & set(world.events)
    assert world.status.recreations == 1


async def test_what_is_applied_to_an_object_that_goes_goes_with_it_and_that_is_said() -> None:
    world = ResourceWorld()
    await world.run(8)
    world.cloud.stays.add("team-v5e")
    world.delete()
    world.edit(joinTimeoutSeconds=1234)
    await world.run(4)
    assert "apply it again once it is gone" in world.message("Active")
    world.cloud.stays.clear()
    await world.run(6)
    assert world.raw is None
    assert list_ids(world) == []


@pytest.mark.parametrize("at_once", [False, True])
async def test_of_two_namespaces_that_make_one_name_the_later_is_told_whose_it_is(*, at_once: bool) -> None:
    first = ResourceWorld(namespace="team", name="a-b")
    second = ResourceWorld(service=first.cloud, namespace="team-a", name="b")
    second.make_object("uid-2")

    async def go_on(rounds: int, *worlds: ResourceWorld) -> None:
        for _ in range(rounds):
            for world in worlds:
                await world.reconcile()
            first.step()
            second.now = first.now

    await go_on(0 if at_once else 8, first)
    if at_once:  # both have looked before either has asked
        for _ in range(2):
            await first.reconcile()
            await second.reconcile()
    await go_on(10, first, second)
    assert first.status.state is ACTIVE
    assert second.condition("Accepted") == ("False", "OwnedByOther")
    assert "stepkeeper-namespace=team, stepkeeper-name=a-b" in second.message("Accepted")
    assert "choose another metadata.name" in second.message("Accepted")
    second.delete()
    await go_on(40, first, second)
    assert second.raw is None
    (kept,) = first.cloud.resources.values()
    assert (kept.id, kept.state, kept.node["labels"][UID_LABEL]) == ("team-a-b", "ACTIVE", "uid-1")
