"""Test that a list which leaves something out destroys nothing and lets go of nothing."""

import pytest

from fake_cluster.queued_resources import PLACE
from fake_cluster.resource_world import active
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudNode, CloudTPUError, ErrorKind, Place
from stepkeeper_operator.labels import SLICE_LABEL


@pytest.mark.parametrize(
    ("left_out", "readable"), [("team-v5e", True), ("team-v5e-1", True), ("team-v5e", False)]
)
async def test_what_lists_leave_out_is_asked_for_by_name_before_machines_are_given_up(
    left_out: str, *, readable: bool
) -> None:
    world = await active(slices={"count": 2})
    world.cloud.unlisted.add(left_out)
    if not readable:
        world.cloud.inject_error("GetQueuedResource", "UNAVAILABLE", None, message="down")
    await world.run(40)
    assert not {"Preempted", "Vanished"} & set(world.events)
    assert world.cloud.created == ["team-v5e"]
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")


async def test_a_slice_that_is_gone_ends_the_resource_once_its_name_finds_nothing_either() -> None:
    world = await active(slices={"count": 2})
    gone = world.cloud.nodes.pop((PLACE, "team-v5e-1"))
    asked = world.cloud.count("GetNode")
    while "Preempted" not in world.events:
        await world.reconcile()
        world.now += 1
    assert world.cloud.count("GetNode") > asked
    world.cloud.nodes[PLACE, gone.id] = gone  # the deletion takes it along
    await world.run(40)
    assert world.cloud.created == ["team-v5e", "team-v5e-r1"]


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


@pytest.mark.parametrize("silent", [False, True], ids=["hosts are Ready", "hosts are silent"])
async def test_an_emptied_status_and_a_short_list_cost_no_machine(*, silent: bool) -> None:
    world = await active()
    world.cloud.set_nodes("PREEMPTED")
    await world.run(40)
    assert world.status.operator.number == 1
    await world.run(40, 120)  # until the API has forgotten the first request
    raw = world.raw
    assert raw is not None
    if silent:
        world.sync_hosts([])
        world.sync_hosts = lambda *_: None  # type: ignore[method-assign]
    world.cloud.unlisted |= {"team-v5e-r1"}
    world.cluster.put("queuedresources", {key: raw[key] for key in raw if key != "status"})
    world.restart_operator()
    await world.run(10)
    assert world.cloud.created == ["team-v5e", "team-v5e-r1"]
    assert world.hosts == ["team-v5e-r1-w0"]
    world.cloud.unlisted.clear()
    await world.run(2)
    assert world.status.operator.number == 1
    assert [cloud_id for _, cloud_id in world.cloud.resources] == ["team-v5e-r1"]


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
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert world.hosts == []
