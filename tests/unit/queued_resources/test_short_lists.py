"""Test that a list which leaves something out destroys nothing and lets go of nothing."""

import pytest

from fake_cluster.queued_resources import PLACE
from fake_cluster.resource_world import ResourceWorld, active
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudNode, CloudTPUError, ErrorKind, Place
from stepkeeper_operator.labels import CLOUD_NODE_LABEL


@pytest.mark.parametrize(
    ("left_out", "readable"), [("team-v5e", True), ("team-v5e-1", True), ("team-v5e", False)]
)
async def test_what_lists_leave_out_is_asked_for_by_name_before_machines_are_given_up(
    left_out: str, *, readable: bool
) -> None:
    world = await active(node={"count": 2})
    world.cloud.unlisted.add(left_out)
    if not readable:
        world.cloud.inject_error("GetQueuedResource", "UNAVAILABLE", None, message="down")
    await world.run(40)
    assert not {"Preempted", "Vanished"} & set(world.events)
    assert world.cloud.created == ["team-v5e"]
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")


async def test_a_slice_that_is_gone_ends_the_resource_after_it_was_missed_twice() -> None:
    world = await active(node={"count": 2})
    gone = world.cloud.nodes.pop((PLACE, "team-v5e-1"))
    asked = world.cloud.count("GetQueuedResource", "GetNode")
    while "Preempted" not in world.events:
        await world.reconcile()
        world.now += 1
        assert world.cloud.count("GetQueuedResource", "GetNode") < asked + 60
    assert world.cloud.count("GetQueuedResource", "GetNode") >= asked + 2
    world.cloud.nodes[PLACE, gone.id] = gone  # the deletion takes it along
    await world.run(40)
    assert world.cloud.created == ["team-v5e", "team-v5e-r1"]


async def test_one_answer_that_says_not_found_destroys_nothing() -> None:
    world = await active()
    resource = world.cloud.resources.pop((PLACE, "team-v5e"))
    node = world.cloud.nodes.pop((PLACE, "team-v5e"))
    world.now += 60
    await world.reconcile()
    await world.reconcile()
    assert world.status.state is QueuedResourceState.ACTIVE
    world.cloud.resources[PLACE, "team-v5e"] = resource
    world.cloud.nodes[PLACE, "team-v5e"] = node
    await world.run(20)
    assert "Vanished" not in world.events
    assert world.hosts == ["team-v5e-w0"]
    assert world.cloud.created == ["team-v5e"]


@pytest.mark.parametrize("before", [True, False], ids=["before the deletion", "during the deletion"])
async def test_a_deletion_lets_go_of_nothing_that_lists_leave_out(*, before: bool) -> None:
    world = await active()
    world.cloud.stays.add("team-v5e")
    if before:
        world.cloud.unlisted.add("team-v5e")
    world.delete()
    await world.run(3)
    world.cloud.unlisted.add("team-v5e")
    await world.run(10)
    assert world.raw is not None, "the cloud still deletes it"
    assert world.cloud.resources[PLACE, "team-v5e"].state == "DELETING"
    del world.cloud.resources[PLACE, "team-v5e"]
    await world.run(10)
    assert world.raw is not None, "its slice is still there"
    assert world.hosts == ["team-v5e-w0"]
    del world.cloud.nodes[PLACE, "team-v5e"]
    await world.run(10)
    assert world.raw is None
    assert world.hosts == []


async def test_an_emptied_status_and_a_short_list_cost_no_machine() -> None:
    world = await active()
    world.cloud.set_nodes("PREEMPTED")
    await world.run(40)
    assert world.status.bookkeeping.number == 1
    raw = world.raw
    assert raw is not None
    world.cloud.unlisted |= {"team-v5e-r1"}
    world.cluster.put("queuedresources", {key: raw[key] for key in raw if key != "status"})
    world.restart_operator()
    await world.run(10)
    assert world.cloud.created == ["team-v5e", "team-v5e-r1"]
    assert world.hosts == ["team-v5e-r1-w0"]
    assert world.status.bookkeeping.number == 1


async def test_what_a_failed_creation_left_is_deleted_though_lists_leave_it_out() -> None:
    world = ResourceWorld()
    world.cloud.unlisted.add("team-v5e")
    for _ in range(6):
        await world.reconcile()
        world.now += 1
    assert world.cloud.created == ["team-v5e"]
    world.cloud.fail("team-v5e", "INTERNAL", "it broke")
    for _ in range(3):
        await world.reconcile()
        world.now += 10
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert not world.cloud.resources


async def test_a_label_that_can_name_no_slice_holds_nothing_up() -> None:
    world = await active()
    known = world.cluster.objects["nodes", None, "team-v5e-w0"]
    labels = {**known["metadata"]["labels"], CLOUD_NODE_LABEL: "Not_An.Id"}
    world.cluster.put("nodes", {**known, "metadata": {**known["metadata"], "labels": labels}})
    get_node = world.cloud.get_node

    async def get_possible(place: Place, node_id: str, version: ApiVersion) -> CloudNode | None:
        if node_id == "Not_An.Id":
            raise CloudTPUError(ErrorKind.TERMINAL, "INVALID_ARGUMENT", "no such name is possible")
        return await get_node(place, node_id, version)

    world.cloud.get_node = get_possible  # type: ignore[method-assign]
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert world.hosts == []
