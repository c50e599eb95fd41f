"""Test writes to Node objects that the API server refuses: told, tried again ever less often, in nobody's way."""

import contextlib

import pytest

from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.errors import ApiError, InvalidObjectError


async def test_pods_are_told_to_end_though_their_node_cannot_be_cordoned() -> None:
    world = ResourceWorld()
    await world.run(8)
    world.add_pod(world.cluster.list_objects("nodes")[0]["metadata"]["name"])
    world.cluster.refusals["patch", "nodes"] = ApiError(403, "webhook nodes.corp says no")
    world.delete()
    for _ in range(3):
        await world.reconcile()
    assert [write.verb for write in world.cluster.writes if write.plural == "pods"] == ["evict"]
    await world.run(8)
    assert world.raw is None


NODE_REFUSALS = {
    "forbidden": ApiError(403, "DELETE /api/v1/nodes/a: 403 Forbidden User cannot delete resource nodes"),
    "webhook": InvalidObjectError(403, 'admission webhook "nodes.corp" denied the request'),
    "webhook is down": ApiError(500, 'InternalError failed calling webhook "nodes.corp": no route to host'),
}


@pytest.mark.parametrize("refusal", NODE_REFUSALS.values(), ids=NODE_REFUSALS)
@pytest.mark.parametrize("by", ["its own deletion", "its end"])
async def test_a_refused_deletion_of_a_node_is_told_with_what_to_do(by: str, refusal: ApiError) -> None:
    world = ResourceWorld(hosts_per_node=2)
    await world.run(8)
    n_nodes = len(world.cluster.list_objects("nodes"))
    assert n_nodes == 2
    world.cluster.refusals["delete", "nodes"] = refusal
    if by == "its own deletion":
        world.delete()
    else:
        world.cloud.fail("team-v5e", "INTERNAL", "it broke")
    await world.run(20)
    assert world.raw is not None
    assert world.ours == [], "nothing is made anew beside what is left"
    assert world.condition("Degraded") == ("True", "NodeDeletionRefused")
    assert world.events.count("NodeDeletionRefused") == 1
    degraded = next(c for c in world.status.conditions if c.type == "Degraded")
    assert str(refusal) in degraded.message
    assert "kubectl delete node" in degraded.message
    asked = {
        write.name for write in world.cluster.writes if (write.verb, write.plural) == ("delete", "nodes")
    }
    assert len(asked) == n_nodes, "one refusal keeps no other node from being asked for"
    del world.cluster.refusals["delete", "nodes"]
    await world.run(40)
    assert (world.raw is None) is (by == "its own deletion")
    if world.raw is not None:
        assert world.condition("Degraded") == ("False", "AsExpected")
        assert world.ours == ["team-v5e-r1"]


async def test_a_passing_error_of_a_nodes_deletion_is_tried_again_and_not_told() -> None:
    world = ResourceWorld()
    await world.run(8)
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


N_HOSTS = 4


async def play_hours(world: ResourceWorld, verb: str) -> list[float]:
    """Let the operator work for two hours, a look whenever it wants one; return when it asked for changes of nodes."""
    asked_s: list[float] = []
    began = world.now
    while world.now - began < 7_200:
        world.cluster.writes.clear()
        wait_s = await world.reconcile()
        n_asked = sum((write.verb, write.plural) == (verb, "nodes") for write in world.cluster.writes)
        asked_s += [world.now - began] * n_asked
        world.step(max(1.0, wait_s or 60.0))
    return asked_s


async def test_refused_deletions_of_nodes_are_asked_for_ever_less_often() -> None:
    world = ResourceWorld(hosts_per_node=N_HOSTS)
    await world.run(8)
    world.cluster.refusals["delete", "nodes"] = NODE_REFUSALS["forbidden"]
    world.delete()
    asked_s = await play_hours(world, "delete")
    at_first = [at_s for at_s in asked_s if at_s <= asked_s[0] + 30]
    assert len(at_first) >= 3 * N_HOSTS, "a right that comes late is used soon"
    in_last_hour = [at_s for at_s in asked_s if at_s > 3_600]
    assert 10 * N_HOSTS <= len(in_last_hour) <= 13 * N_HOSTS, "each every five minutes"
    assert world.condition("Degraded") == ("True", "NodeDeletionRefused")
    del world.cluster.refusals["delete", "nodes"]
    await world.run(32)
    assert world.raw is None


async def test_refused_cordons_of_nodes_are_asked_for_ever_less_often() -> None:
    world = ResourceWorld(hosts_per_node=N_HOSTS)
    await world.run(8)
    world.cluster.refusals["patch", "nodes"] = ApiError(403, "webhook nodes.corp says no")
    world.cluster.refusals["evict", "pods"] = ApiError(429, "a disruption budget forbids it")
    world.add_pod(world.cluster.list_objects("nodes")[0]["metadata"]["name"])
    world.delete()
    n_asked = len(await play_hours(world, "patch"))
    assert 3 * N_HOSTS <= n_asked <= 12 * N_HOSTS, "while its pod has ten minutes to end"
    assert world.raw is None
