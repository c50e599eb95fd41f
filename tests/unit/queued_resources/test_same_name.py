"""Test objects that want one name in the cloud: one after the other, and from two namespaces at once."""

import pytest

from fake_cluster.queued_resources import PLACE
from fake_cluster.resource_owners import JOINED, OTHERS, tell
from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion
from stepkeeper_operator.cloud_tpu.naming import UID_LABEL
from stepkeeper_operator.labels import QUEUED_RESOURCE_UID_LABEL


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
    """The API may report for a while that the name is taken."""

    world = ResourceWorld()
    await delete_and_apply(world, rounds=rounds)
    if n_refusals:
        refused = "fail CreateQueuedResource ALREADY_EXISTS 3, look, look, look, condition Accepted False/AlreadyExists"
        await tell(world, f"{refused}, message Accepted After a recent deletion the name will be free soon")
    await tell(world, f"run 12, state Active, ours team-v5e, there team-v5e, {JOINED}, recreations 0")
    labels = [raw["metadata"]["labels"] for raw in world.cluster.list_objects("nodes")]
    assert {each[QUEUED_RESOURCE_UID_LABEL] for each in labels} == {"uid-2"}


async def test_a_deletion_that_comes_late_and_hits_the_next_of_the_name_is_told_and_made_good() -> None:
    """The API withdraws no request: one of the earlier object's may be carried out after everything is gone."""

    world = ResourceWorld()
    await delete_and_apply(world, rounds=8)
    await tell(world, "run 8, state Active")
    await world.cloud.delete_queued_resource(PLACE, "team-v5e", request_id="", version=ApiVersion.V2)
    await tell(world, "run 12, ours team-v5e-r1, there team-v5e-r1, state Active, recreations 1")
    assert {"Vanished", "Preempted"} & set(world.events)


async def test_what_is_applied_to_an_object_that_goes_goes_with_it_and_that_is_said() -> None:
    world = await tell(ResourceWorld(), "run 8, stay, delete")
    world.edit(joinTimeoutSeconds=1234)
    await tell(world, "run 4, message Active apply it again once it is gone")
    world.cloud.stays.clear()
    await tell(world, "run 6, gone, there")


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
    await tell(first, "state Active")
    await tell(second, OTHERS)
    assert "stepkeeper-namespace=team, stepkeeper-name=a-b" in second.message("Accepted")
    assert "choose another metadata.name" in second.message("Accepted")
    second.delete()
    await go_on(40, first, second)
    assert second.raw is None
    (kept,) = first.cloud.resources.values()
    assert (kept.id, kept.state, kept.node["labels"][UID_LABEL]) == ("team-a-b", "ACTIVE", "uid-1")
