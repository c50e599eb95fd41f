"""Test whose a cloud resource is: the object's whose uid its label is. Others are taken over by annotation alone."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import (
    PLACE,
    decide,
    find,
    kinds,
    make_cloud_resource,
    make_resource,
    observe,
)
from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudQueuedResource, Place
from stepkeeper_operator.facts.queued_resource import read_queued_machines
from stepkeeper_operator.labels import QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.decision import CreateCloudResource
from stepkeeper_operator.queued_resources.naming import CLUSTER_LABEL, UID_LABEL
from tpuapi.cloud import FakeCloud

THEIRS = {
    "stepkeeper-cluster": "another",
    "stepkeeper-namespace": "x",
    "stepkeeper-name": "y",
    "stepkeeper-uid": "z",
}
FORMER = {
    "stepkeeper-cluster": "cluster-uid",
    "stepkeeper-namespace": "team",
    "stepkeeper-name": "v5e",
    "stepkeeper-uid": "uid-0",
}
BY_HAND = {"team": "blue"}
SLICES: dict[str, Any] = {"node": {"count": 2}}
UNFIT: dict[str, dict[str, Any]] = {
    "runtime_version": {"node": {"runtimeVersion": "x"}},
    "accelerator_type": {"node": {"acceleratorType": "v5litepod-16"}},
    "nodes": {"node": {"count": 2}},
    "tier": {"tier": {"guaranteed": {}}},
}


class LateCloud:
    """The same cloud by a slow network: labels arrive when `go` is set."""

    def __init__(self, cloud: FakeCloud) -> None:
        self._cloud = cloud
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cloud, name)

    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
        self.asked.set()
        await self.go.wait()
        await self._cloud.set_node_labels(place, node_id, labels, version)


def made(
    labels: Mapping[str, str] = BY_HAND, state: str = "ACTIVE", cloud_id: str = "team-v5e", **spec: Any
) -> CloudQueuedResource:
    """Make a cloud resource that isn't the object's."""
    asked = make_cloud_resource(make_resource(**spec), state)
    node = {key: value for key, value in asked.node.items() if key != "metadata"}
    node_ids = tuple(name.replace("team-v5e", cloud_id) for name in asked.node_ids)
    return replace(asked, id=cloud_id, node_ids=node_ids, node={**node, "labels": dict(labels)})


def beside(world: ResourceWorld, service: Any = None, **spec: Any) -> ResourceWorld:
    """Make another cluster with an object of the same namespace and name, in the same cloud."""
    cloud = service or world.cloud
    return ResourceWorld(service=cloud, cluster_id="another", uid="uid-2", now=world.now, **spec)


async def run_both(rounds: int, *worlds: ResourceWorld) -> None:
    for _ in range(rounds):
        for world in worlds:
            await world.reconcile()
            await world.reconcile()
        worlds[0].step()
        for world in worlds[1:]:
            world.now = worlds[0].now


def owners(world: ResourceWorld) -> set[str | None]:
    return {node.labels.get(UID_LABEL) for node in world.cloud.nodes.values()}


def relabel(world: ResourceWorld, labels: Mapping[str, str]) -> None:
    for key, node in world.cloud.nodes.items():
        world.cloud.nodes[key] = replace(node, labels=labels)


def message(world: ResourceWorld, kind: str = "Accepted") -> str:
    return next(c.message for c in world.status.conditions if c.type == kind)


async def adopting(labels: Mapping[str, str] = BY_HAND, **spec: Any) -> ResourceWorld:
    world = ResourceWorld(adopt="team-v5e", **spec)
    world.cloud.add(made(labels, **spec))
    await world.run(8)
    assert world.status.bookkeeping.adopted
    assert world.condition("Accepted") == ("True", "Accepted")
    return world


async def retained(preemptions: int, **spec: Any) -> ResourceWorld:
    """Make one, let it be preempted so many times, and delete its object so that the machines stay."""
    world = ResourceWorld(deletion_policy="Retain", **spec)
    await world.run(12)
    for _ in range(preemptions):
        world.cloud.set_nodes("PREEMPTED")
        await world.run(40)
    world.delete()
    await world.run(2)
    assert world.raw is None
    assert "Retained" in world.events
    assert len(world.cloud.resources) == 1
    return world


@pytest.mark.parametrize("labels", [BY_HAND, THEIRS, FORMER], ids=["no label", "another's", "a former's"])
@pytest.mark.parametrize("state", ["CREATING", "ACTIVE", "SUSPENDED", "FAILED", "DELETING", "NEW"])
def test_what_does_not_carry_our_label_blocks_and_is_told_with_the_way_to_take_it_over(
    labels: dict[str, str], state: str
) -> None:
    decision = decide(make_resource(), observe(made(labels, state)))
    assert decision.actions == ()
    accepted = find(decision, "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "NotOurs")
    assert "stepkeeper.dev/adopt: team-v5e on" in accepted.message
    assert state in accepted.message
    assert labels.get(UID_LABEL, "carries no label") in accepted.message


@pytest.mark.parametrize(
    ("labels", "blocks"), [(FORMER, True), (THEIRS, False), ({}, False)], ids=["a former's", "theirs", "none"]
)
def test_under_a_later_id_a_former_objects_alone_blocks(labels: dict[str, str], *, blocks: bool) -> None:
    decision = decide(make_resource(), observe(made(labels, cloud_id="team-v5e-r2")))
    assert kinds(decision) == ([] if blocks else [CreateCloudResource])
    if blocks:
        assert "stepkeeper.dev/adopt: team-v5e-r2 on" in find(decision, "Accepted").message


@pytest.mark.parametrize("adopt", ["v5e", "team-v5e-r1", "TEAM-V5E", "team-v5e ", "team-v5e,team-v5e-r1"])
@pytest.mark.parametrize("exists", [True, False])
def test_an_annotation_that_names_nothing_there_is_told(adopt: str, *, exists: bool) -> None:
    decision = decide(make_resource(adopt=adopt), observe(*([made()] if exists else [])))
    assert decision.actions == ()
    accepted = find(decision, "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "NotOurs" if exists else "NothingToAdopt")
    assert f"names {adopt}" in accepted.message


@pytest.mark.parametrize("field", UNFIT)
async def test_other_machines_than_the_spec_asks_for_are_not_taken_over(field: str) -> None:
    world = ResourceWorld(adopt="team-v5e", **UNFIT[field])
    world.cloud.add(made())
    await world.run(4)
    assert world.condition("Accepted") == ("False", "Differs")
    assert f"{field}: asked for " in message(world)
    assert owners(world) == {None}


@pytest.mark.parametrize("spec", [{}, SLICES], ids=["one slice", "two slices"])
@pytest.mark.parametrize("whose", ["nobody's", "another cluster's", "retained", "retained, a later one"])
@pytest.mark.parametrize("forgets", ["nothing", "its process", "its status"])
async def test_what_the_annotation_names_is_taken_over(
    whose: str, forgets: str, spec: dict[str, Any]
) -> None:
    if whose.startswith("retained"):
        world = await retained(int("later" in whose), **spec)
        world.make_object("uid-2", **spec)
    else:
        world = ResourceWorld(uid="uid-2", **spec)
        world.cloud.add(made(BY_HAND if whose == "nobody's" else THEIRS, **spec))
    created, ((_, cloud_id),) = list(world.cloud.created), world.cloud.resources
    await world.run(2)
    assert world.condition("Accepted") == ("False", "NotOurs")
    world.annotate(cloud_id)
    for _ in range(6):
        await world.run(2)
        if forgets == "its process":
            world.restart_operator()
        if forgets == "its status" and world.raw is not None:
            world.cluster.put("queuedresources", {k: v for k, v in world.raw.items() if k != "status"})
    await world.run(4)
    assert world.cloud.created == created
    assert world.status.state is QueuedResourceState.ACTIVE
    assert world.status.cloud_name.endswith(f"/{cloud_id}")
    assert world.condition("Accepted") == ("True", "Accepted")
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
    assert world.events.count("Adopted") == 1 or forgets == "its status"
    assert owners(world) == {"uid-2"}
    assert (
        all(node.labels.get("team") == "blue" for node in world.cloud.nodes.values()) or whose != "nobody's"
    )
    hosts = world.cluster.list_objects("nodes")
    assert {host["metadata"]["labels"][QUEUED_RESOURCE_UID_LABEL] for host in hosts} == {"uid-2"}
    assert await world.record_writes() == []
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert not world.cloud.resources
    assert not world.cluster.list_objects("nodes")


@pytest.mark.parametrize("before", [True, False], ids=["not carried out", "carried out"])
@pytest.mark.parametrize("then", ["stays", "is deleted"])
@pytest.mark.parametrize("kill_at", range(8))
async def test_an_operator_that_is_killed_at_any_write_forgets_no_machine(
    kill_at: int, then: str, *, before: bool
) -> None:
    world = ResourceWorld(adopt="team-v5e", **SLICES)
    world.cloud.add(made(**SLICES))
    world.kill_at, world.kill_before = kill_at, before
    for _ in range(60):
        if world.kill_at is None:
            break
        await world.reconcile()
        if then == "stays":
            world.step()
    if then == "stays":
        await world.run(20)
        assert world.status.bookkeeping.adopted
        assert world.cloud.created == []
    labelled = "uid-1" in owners(world)
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert not world.cloud.resources or not labelled


async def test_the_annotation_is_harmless_afterwards() -> None:
    world = await adopting()
    world.cloud.set_nodes("PREEMPTED")
    await world.run(40)
    assert world.cloud.created == ["team-v5e-r1"]
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
    world.cloud.add(made())
    world.annotate("team-v5e")
    await world.run(8)
    assert world.ours == ["team-v5e-r1"]
    assert world.cloud.nodes[PLACE, "team-v5e"].labels == BY_HAND


@pytest.mark.parametrize("spec", [{}, SLICES], ids=["one slice", "two slices"])
async def test_of_two_objects_that_name_it_the_last_label_has_it(spec: dict[str, Any]) -> None:
    first = ResourceWorld(adopt="team-v5e", **spec)
    first.cloud.add(made(**spec))
    late = LateCloud(first.cloud)
    second = beside(first, late, adopt="team-v5e", **spec)
    labelling = asyncio.create_task(second.run(1))
    await asyncio.wait_for(late.asked.wait(), 10)
    await run_both(4, first)
    assert first.condition("Accepted") == ("True", "Accepted")
    late.go.set()
    await labelling
    second.now = first.now
    await run_both(16, first, second)
    assert first.condition("Accepted") == ("False", "NotOurs")
    assert "LetGo" in first.events
    assert second.condition("Accepted") == ("True", "Accepted")
    assert owners(first) == {"uid-2"}
    assert await first.record_writes() == []
    assert await second.record_writes() == []
    first.delete()
    await run_both(10, first, second)
    assert first.raw is None
    assert first.cloud.resources[PLACE, "team-v5e"].state == "ACTIVE"


@pytest.mark.parametrize("adopted", [True, False], ids=["adopted", "made"])
@pytest.mark.parametrize("leave", ["delete", "stay"])
async def test_what_somebody_else_takes_over_is_let_go_untouched(leave: str, *, adopted: bool) -> None:
    world = await adopting() if adopted else ResourceWorld()
    await world.run(14)
    requests: list[str] = []
    world.cloud.on_request = lambda verb, _id: requests.append(verb)
    relabel(world, THEIRS)
    if leave == "delete":
        world.delete()
    await world.run(20)
    assert requests == []
    assert owners(world) == {"z"}
    assert world.events.count("LetGo") == 1
    if leave == "delete":
        assert world.raw is None
        return
    assert world.condition("Accepted") == ("False", "NotOurs")
    world.annotate(None)
    await world.run(4)
    world.annotate("team-v5e")
    await world.run(8)
    assert owners(world) == {"uid-1"}
    assert world.condition("Accepted") == ("True", "Accepted")


@pytest.mark.parametrize("state", ["WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED"])
@pytest.mark.parametrize("deletes", [False, True])
async def test_what_has_no_nodes_is_adopted_once_it_has(state: str, *, deletes: bool) -> None:
    world = ResourceWorld(adopt="team-v5e")
    world.cloud.set_capacity("v5litepod", 0)
    world.cloud.resources[PLACE, "team-v5e"] = made(state=state)
    await world.run(1)
    assert world.condition("Accepted") == ("Unknown", "Adopting")
    assert world.raw is not None
    assert read_queued_machines(world.raw).obstacle == message(world)
    assert state in message(world)
    world.cloud.set_capacity("v5litepod", None)
    if deletes:
        world.delete()
    await world.run(25)
    assert world.cloud.created == []
    if deletes:
        assert world.raw is None
        assert world.cloud.resources[PLACE, "team-v5e"].state != "DELETING"
    elif state == "WAITING_FOR_RESOURCES":
        assert world.status.state is QueuedResourceState.ACTIVE
        assert world.status.bookkeeping.adopted


async def test_an_adopted_one_that_has_lost_its_nodes_is_made_anew() -> None:
    world = await adopting(FORMER)
    world.cloud.suspend("team-v5e")
    world.cloud.nodes.clear()
    await world.run(30)
    assert list(world.cloud.resources) == [(PLACE, "team-v5e-r1")]
    assert world.status.recreations == 1


async def test_a_refusal_to_write_labels_is_told_in_the_clouds_words() -> None:
    world = ResourceWorld(adopt="team-v5e")
    world.cloud.add(made())
    world.cloud.inject_error("UpdateNode", "PERMISSION_DENIED", message="no tpu.nodes.update")
    await world.run(4)
    assert world.condition("Accepted") == ("False", "Refused")
    assert "no tpu.nodes.update" in message(world)
    assert not world.status.bookkeeping.adopted
    await world.run(40, seconds=100)
    assert world.status.bookkeeping.adopted
    assert world.status.error is None


@pytest.mark.parametrize("deletes", [False, True])
async def test_an_adoption_may_begin_with_a_refused_creation(*, deletes: bool) -> None:
    world = ResourceWorld()
    world.cloud.add(made())
    world.cloud.unlisted = {"team-v5e"}
    await world.run(2)
    assert world.status.error is not None
    assert world.status.error.code == "ALREADY_EXISTS"
    world.cloud.unlisted = set()
    await world.run(4)
    assert world.condition("Accepted") == ("False", "NotOurs")
    if deletes:
        world.delete()
        await world.run(20)
        assert world.raw is None
        assert world.cloud.resources[PLACE, "team-v5e"].state == "ACTIVE"
        return
    world.annotate("team-v5e")
    await world.run(14)
    assert world.condition("Accepted") == ("True", "Accepted")
    assert world.status.bookkeeping.adopted
    assert world.status.error is None


async def test_labels_of_its_nodes_name_the_cluster_too() -> None:
    world = await adopting(THEIRS)
    assert {node.labels[CLUSTER_LABEL] for node in world.cloud.nodes.values()} == {"cluster-uid"}
