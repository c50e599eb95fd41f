"""Test over random stories that no object ever has two cloud resources, and that each comes to what it should be."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stepkeeper_operator.api.v1alpha1.queuedresource_status import MAX_NODES, QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import CloudMaintenance, CloudQueuedResource, ErrorKind
from stepkeeper_operator.testing.queued_resources import PLACE, make_cloud_resource
from stepkeeper_operator.testing.resource_world import ResourceWorld

ERRORS = (
    (ErrorKind.TRANSIENT, "UNAVAILABLE"),
    (ErrorKind.TRANSIENT, "DEADLINE_EXCEEDED"),
    (ErrorKind.QUOTA, "RESOURCE_EXHAUSTED"),
    (ErrorKind.TERMINAL, "PERMISSION_DENIED"),
    (ErrorKind.BUSY, "FAILED_PRECONDITION"),
    (ErrorKind.CREDENTIALS, "UNAUTHENTICATED"),
    (ErrorKind.NOT_FOUND, "NOT_FOUND"),
    (ErrorKind.ALREADY_EXISTS, "ALREADY_EXISTS"),
)
FOREIGN_LABELS = {"stepkeeper-cluster": "another", "stepkeeper-namespace": "x", "stepkeeper-uid": "y"}


class World(ResourceWorld):
    """A world that checks every request to the cloud."""

    def __init__(self) -> None:
        super().__init__(update_policy="Recreate", queueing={"validUntilSeconds": 4000})
        self.foreign = self._add_foreign("team-v5e-r1"), self._add_foreign("team-other")
        self.deleting = False
        self.cloud.on_request = self._check_request

    def _add_foreign(self, cloud_id: str) -> CloudQueuedResource:
        made = make_cloud_resource(self.resource, "ACTIVE", id=cloud_id, node_ids=(f"{cloud_id}-node",))
        self.cloud.add(replace(made, node={**made.node, "labels": FOREIGN_LABELS}))
        return self.cloud.resources[PLACE, cloud_id]

    def _check_request(self, verb: str, cloud_id: str) -> None:
        foreign = {resource.id for resource in self.foreign}
        if verb == "delete":
            assert cloud_id not in foreign, "somebody else's is never touched"
            return
        raw = self.raw
        assert raw is not None
        assert raw["metadata"].get("finalizers"), "somebody will remove it"
        assert raw["status"]["cloudName"].endswith(f"/{cloud_id}"), "the status names it before it exists"
        assert set(self.ours) <= {cloud_id}, "what is left of the earlier one is deleted first"
        nodes = [
            node.id for node in self.cloud.nodes.values() if node.labels.get("stepkeeper-uid") == self.uid
        ]
        assert set(self.ours) or not nodes, "the earlier one's machines are gone"


def _fail(world: World, verb: str, index: int) -> None:
    kind, code = ERRORS[index % len(ERRORS)]
    # Only an error that doesn't tell what became of the request can come with a request that was carried out.
    world.cloud.fail_next(verb, kind, code, carried_out=kind is ErrorKind.TRANSIENT and index >= len(ERRORS))


def _set_state(world: World, state: str, error: tuple[str, str] = ("", "")) -> None:
    for cloud_id in world.ours:
        world.cloud.set_state(cloud_id, state, error=error)


def _kill(world: World, index: int) -> None:
    world.kill_at, world.kill_before = index // 2, bool(index % 2)


def _edit(world: World, index: int) -> None:
    if world.raw is not None:
        kind = f"v5litepod-{2 ** (2 + index % 3)}"
        world.edit(node={"acceleratorType": kind, "runtimeVersion": "v2-alpha-tpuv5-lite"})


def _forget_status(world: World) -> None:
    raw = world.raw
    if raw is not None:
        world.cluster.put("queuedresources", {key: raw[key] for key in raw if key != "status"})


def _delete_by_hand(world: World) -> None:
    for cloud_id in world.ours:
        world.cloud.resources[PLACE, cloud_id] = replace(
            world.cloud.resources[PLACE, cloud_id], state="DELETING"
        )


def _set_quota(world: World, quota: int | None) -> None:
    world.cloud.quota = quota


def _hide(world: World, index: int) -> None:
    """Let lists leave out what is the object's, or show it again."""
    mine = [r for r in world.cloud.resources.values() if r.id in world.ours]
    names = sorted({r.id for r in mine} | {node_id for r in mine for node_id in r.node_ids})
    world.cloud.unlisted = set(names[index % 2 :]) if index < 8 else set()


def _run_pod(world: World) -> None:
    for raw in world.cluster.list_objects("nodes")[:1]:
        world.add_pod(raw["metadata"]["name"])


HAPPENINGS: dict[str, Callable[[World, int], object]] = {
    "a list fails": lambda world, index: _fail(world, "list", index),
    "a creation fails": lambda world, index: _fail(world, "create", index),
    "a deletion fails": lambda world, index: _fail(world, "delete", index),
    "an operation can't be read": lambda world, index: _fail(world, "operation", index),
    "something can't be read by its name": lambda world, index: _fail(world, "get", index),
    "a list leaves something out": _hide,
    "the cloud goes on": lambda world, _index: world.step(),
    "time passes": lambda world, index: setattr(world, "now", world.now + 60 * (index + 1)),
    "it is suspended": lambda world, _index: _set_state(world, "SUSPENDED"),
    "it begins to be suspended": lambda world, _index: _set_state(world, "SUSPENDING"),
    "it fails": lambda world, _index: _set_state(world, "FAILED", ("INTERNAL", "it broke")),
    "it fails for quota": lambda world, _index: _set_state(world, "FAILED", ("RESOURCE_EXHAUSTED", "none")),
    "it is active": lambda world, _index: _set_state(world, "ACTIVE"),
    "its nodes are preempted": lambda world, _index: world.cloud.set_nodes("PREEMPTED"),
    "its nodes are terminated": lambda world, _index: world.cloud.set_nodes("TERMINATED"),
    "maintenance is announced": lambda world, _index: world.cloud.set_nodes(
        maintenance=CloudMaintenance(type="SCHEDULED", status="PENDING", window_start=int(world.now) + 600)
    ),
    "somebody deletes it in the cloud": lambda world, _index: _delete_by_hand(world),
    "there is no quota": lambda world, _index: _set_quota(world, 2),
    "there is quota": lambda world, _index: _set_quota(world, None),
    "the operator is killed": _kill,
    "the operator is restarted": lambda world, _index: world.restart_operator(),
    "the spec is changed": _edit,
    "the status is lost": lambda world, _index: _forget_status(world),
    "a pod runs": lambda world, _index: _run_pod(world),
}

happenings = st.lists(
    st.tuples(st.sampled_from(sorted(HAPPENINGS)), st.integers(0, 15), st.integers(0, 4)), max_size=16
)
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]


async def play(world: World, story: list[tuple[str, int, int]]) -> None:
    for name, index, rounds in story:
        HAPPENINGS[name](world, index)
        for _ in range(rounds):
            await world.reconcile()
            check(world)
            world.now += 1
            world.sync_hosts()


def check(world: World) -> None:
    assert len(world.ours) <= 1, "an object never has two"
    for resource in world.foreign:
        assert world.cloud.resources[PLACE, resource.id] == resource, "somebody else's is never touched"
    if world.raw is not None and "status" in world.raw:
        assert len(world.status.nodes) <= MAX_NODES


async def come_to_rest(world: World) -> None:
    """Let all faults pass, and then the waits and back-offs."""
    world.cloud.faults.clear()
    world.cloud.unlisted.clear()
    world.cloud.quota = None
    world.kill_at = None
    for _ in range(45):
        for _ in range(2):
            await world.reconcile()
            check(world)
        world.step(400)


@settings(max_examples=60, deadline=None, suppress_health_check=slow)
@given(story=happenings)
@example(story=[("a creation fails", 9, 1), ("the spec is changed", 1, 4)])
@example(
    story=[
        ("a deletion fails", 0, 2),
        ("a creation fails", 0, 3),
        ("it is active", 0, 4),
        ("it fails", 0, 4),
        ("the status is lost", 0, 0),
        ("it is active", 0, 0),
    ]
)
def test_a_resource_that_could_become_active_does(story: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        world = World()
        await play(world, story)
        await come_to_rest(world)
        assert world.status.state is QueuedResourceState.ACTIVE
        assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
        assert world.condition("Accepted") == ("True", "Accepted")
        assert world.status.error is None
        assert await world.record_writes() == []

    asyncio.run(run())


@settings(max_examples=60, deadline=None, suppress_health_check=slow)
@given(story=happenings, later=happenings)
@example(story=[("a deletion fails", 0, 2), ("the status is lost", 0, 0)], later=[])
@example(story=[("a deletion fails", 0, 2), ("the status is lost", 0, 0), ("a list fails", 0, 1)], later=[])
@example(
    story=[("a deletion fails", 0, 2), ("a list fails", 3, 0), ("the status is lost", 0, 0)],
    later=[("a creation fails", 0, 1)],
)
def test_a_deletion_always_ends_and_leaves_nothing(
    story: list[tuple[str, int, int]], later: list[tuple[str, int, int]]
) -> None:
    async def run() -> None:
        world = World()
        await play(world, story)
        world.delete()
        await play(
            world, [step for step in later if step[0] not in {"the status is lost", "the spec is changed"}]
        )
        await come_to_rest(world)
        assert world.raw is None
        assert not world.ours
        nodes = world.cluster.list_objects("nodes")
        assert not [raw for raw in nodes if world.uid in raw["metadata"]["labels"].values()]

    asyncio.run(run())


@settings(max_examples=25, deadline=None, suppress_health_check=slow)
@given(story=happenings)
def test_a_restarted_operator_decides_as_the_old_one_would_have(story: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        world = World()
        await play(world, story)
        await come_to_rest(world)
        world.restart_operator()
        assert await world.record_writes() == []

    asyncio.run(run())
