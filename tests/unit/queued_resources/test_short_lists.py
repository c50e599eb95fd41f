"""Test that a list which leaves something out destroys nothing and lets go of nothing."""

import pytest

from fake_cluster.queued_resources import PLACE
from fake_cluster.resource_owners import JOINED, tell
from fake_cluster.resource_world import ResourceWorld, active
from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudNode,
    CloudOperationState,
    CloudTPUError,
    ErrorKind,
    Place,
)
from stepkeeper_operator.labels import SLICE_LABEL


@pytest.mark.parametrize(
    "story", ["hide team-v5e", "hide team-v5e-1", "hide team-v5e, fail GetQueuedResource UNAVAILABLE"]
)
async def test_what_lists_leave_out_is_asked_for_by_name_before_machines_are_given_up(story: str) -> None:
    ends = "events Preempted 0, events Vanished 0"
    await tell(await active(slices={"count": 2}), f"{story}, run 40, {ends}, created team-v5e, {JOINED}")


async def test_a_slice_that_is_gone_ends_the_resource_once_its_name_finds_nothing_either() -> None:
    world = await active(slices={"count": 2})
    gone = world.cloud.nodes.pop((PLACE, "team-v5e-1"))
    asked = world.cloud.count("GetNode")
    while "Preempted" not in world.events:
        await tell(world, "look, wait 1")
    assert world.cloud.count("GetNode") > asked
    world.cloud.nodes[PLACE, gone.id] = gone  # the deletion takes it along
    await tell(world, "run 40, created team-v5e team-v5e-r1")


@pytest.mark.parametrize("before", ["hide team-v5e, delete, run 3", "delete, run 3, hide team-v5e"])
async def test_a_deletion_lets_go_of_nothing_that_lists_leave_out(before: str) -> None:
    # The cloud still deletes it.
    world = await tell(await active(), f"stay, {before}, run 10, exists")
    assert world.cloud.resources[PLACE, "team-v5e"].state == "DELETING"
    del world.cloud.resources[PLACE, "team-v5e"]
    await tell(world, "run 10, exists, hosts team-v5e-w0")  # its slice is still there
    del world.cloud.nodes[PLACE, "team-v5e"]
    await tell(world, "run 10, nothing-left")


async def test_a_label_that_can_name_no_slice_holds_nothing_up() -> None:
    world = await active()
    known = world.cluster.objects["nodes", None, "team-v5e-w0"]
    labels = {**known["metadata"]["labels"], SLICE_LABEL: "Not_An.Id"}
    world.cluster.put("nodes", {**known, "metadata": {**known["metadata"], "labels": labels}})
    get_node = world.cloud.get_node

    async def get_possible(place: Place, node_id: str, version: ApiVersion) -> CloudNode | None:
        if node_id == "Not_An.Id":
            raise CloudTPUError(ErrorKind.TERMINAL, "INVALID_ARGUMENT", "no such name is possible")
        return await get_node(place, node_id, version)

    world.cloud.get_node = get_possible  # type: ignore[method-assign]
    await tell(world, "delete, run 20, nothing-left")


async def test_the_result_of_an_operation_is_judged_by_a_list_from_after_its_end() -> None:
    world = ResourceWorld()
    while world.status.operation is None:
        await world.reconcile()
    world.step(20.0)  # now the operation is read again
    observer = world.controller._observer

    async def answer_late(name: str, version: ApiVersion) -> CloudOperationState:
        world.now += 0.5
        await observer._poller.list_place(PLACE, newer_than=world.now)  # for another object, before the end
        world.now += 0.5
        return CloudOperationState(name=name, done=True)

    world.cloud.get_operation = answer_late  # type: ignore[method-assign]
    n_lists = world.cloud.count("ListNodes")
    await world.reconcile()
    assert world.status.operation is None
    assert world.cloud.count("ListNodes") == n_lists + 2
