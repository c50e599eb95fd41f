"""Test what a deletion or recreation meets at Node objects: refused writes, cordons of others, pods that save."""

import contextlib
from typing import Any

import pytest

from fake_cluster.resource_owners import record_requests, tell
from fake_cluster.resource_world import ResourceWorld, active
from stepkeeper_operator.errors import ApiError, InvalidObjectError

N_HOSTS = 4
NODE_REFUSALS = {
    "forbidden": ApiError(403, "DELETE /api/v1/nodes/a: 403 Forbidden User cannot delete resource nodes"),
    "webhook": InvalidObjectError(403, 'admission webhook "nodes.corp" denied the request'),
    "webhook is down": ApiError(500, 'InternalError failed calling webhook "nodes.corp": no route to host'),
}
by_either = pytest.mark.parametrize("deleted", [True, False], ids=["its own deletion", "its end"])


def end(world: ResourceWorld, *, deleted: bool) -> None:
    if deleted:
        world.delete()
    else:
        world.cloud.fail("team-v5e", "INTERNAL", "it broke")
        world.now += 30  # a list from before isn't taken any more


@pytest.mark.parametrize("refusal", NODE_REFUSALS.values(), ids=NODE_REFUSALS)
@by_either
async def test_a_refused_deletion_of_a_node_is_told_with_what_to_do(
    refusal: ApiError, *, deleted: bool
) -> None:
    world = await active(hosts_per_node=2)
    world.cluster.refusals["delete", "nodes"] = refusal
    end(world, deleted=deleted)
    # Nothing is recreated beside the leftovers.
    await tell(
        world,
        "run 20, exists, ours, condition Degraded True/NodeDeletionRefused, events NodeDeletionRefused 1",
    )
    assert str(refusal) in world.message("Degraded")
    assert "kubectl delete node" in world.message("Degraded")
    asked = {w.name for w in world.cluster.writes if (w.verb, w.plural) == ("delete", "nodes")}
    assert len(asked) == 2, "one refusal keeps no other node from being asked for"
    del world.cluster.refusals["delete", "nodes"]
    await tell(world, "run 40")
    await tell(world, "gone" if deleted else "condition Degraded False/AsExpected, ours team-v5e-r1")


async def test_a_passing_error_of_a_nodes_deletion_is_tried_again_and_not_told() -> None:
    world = await active()
    world.cluster.refusals["delete", "nodes"] = ApiError(0, "no answer within 30 s")
    world.delete()
    for _ in range(6):
        with contextlib.suppress(ApiError):
            await world.reconcile()
        world.step()
    assert world.condition("Degraded") == ("False", "AsExpected")
    del world.cluster.refusals["delete", "nodes"]
    await world.run(4)
    assert world.raw is None


@pytest.mark.parametrize(("verb", "least", "most"), [("delete", 100, 250), ("patch", 10, 15)])
async def test_refused_writes_to_nodes_are_asked_for_again(
    verb: str, least: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "stepkeeper_operator")
    world = await active(hosts_per_node=N_HOSTS)
    world.add_pod(world.hosts[0])
    world.cluster.refusals[verb, "nodes"] = NODE_REFUSALS["forbidden"]
    world.cluster.refusals["evict", "pods"] = ApiError(429, "disruption budget")
    world.delete()
    asked, began = 0, world.now
    while world.now - began < 1_800:
        world.cluster.writes.clear()
        wait_s = await world.reconcile()
        asked += sum((write.verb, write.plural) == (verb, "nodes") for write in world.cluster.writes)
        world.step(max(1.0, wait_s or 60.0))
    assert least * N_HOSTS <= asked <= most * N_HOSTS
    assert sum("cannot cordon" in text for text in caplog.messages) == (verb == "patch") * asked / N_HOSTS
    assert (world.raw is None) is (verb == "patch"), "a cordon holds nothing up"


async def test_a_last_look_that_fails_is_taken_again_before_anything_is_deleted() -> None:
    world = await active()
    world.sync_hosts = lambda *_: None  # type: ignore[method-assign]
    asked = record_requests(world)
    await tell(world, "fail GetQueuedResource UNAVAILABLE 1, delete, run 1")
    assert asked == []
    await world.run(8)
    assert asked == ["delete team-v5e"]


def unschedulable(world: ResourceWorld) -> list[bool]:
    nodes = world.cluster.list_objects("nodes")
    return [raw["spec"].get("unschedulable", False) for raw in nodes]


async def draining(**spec: Any) -> ResourceWorld:
    """Make one of two slices with a pod that saves on the first; a user has cordoned the second's node."""
    world = await active(slices={"count": 2}, **spec)
    theirs = world.cluster.objects["nodes", None, "team-v5e-1-w0"]
    world.cluster.put("nodes", {**theirs, "spec": {"unschedulable": True}})
    world.add_pod("team-v5e-0-w0")
    return world


@pytest.mark.parametrize("kill_at", [None, 0, 1, 2])
async def test_retain_in_the_midst_of_a_deletion_uncordons_what_we_cordoned(kill_at: int | None) -> None:
    world = await tell(await draining(), "delete, run 1")
    assert unschedulable(world) == [True, True]
    world.edit(deletionPolicy="Retain")
    world.kill_at, world.kill_before = kill_at, False
    await tell(world, "run 3, gone, there team-v5e")
    assert unschedulable(world) == [False, True]
    node = world.cluster.objects["nodes", None, "team-v5e-0-w0"]
    assert not node["metadata"].get("annotations")


async def test_a_retained_object_that_is_deleted_in_the_midst_of_a_drain_leaves_no_cordon() -> None:
    world = await draining(deletion_policy="Retain", update_policy="Recreate")
    world.edit(slices={"count": 2, "accelerator": "v5e", "topology": "2x2", "image": "x"})
    await world.run(2)
    assert unschedulable(world)[0]
    await tell(world, "delete, restart, run 2, gone")
    assert unschedulable(world) == [False, True]
