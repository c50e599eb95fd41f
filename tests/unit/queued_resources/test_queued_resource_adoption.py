"""Test whose the machines are that nobody's request has labelled: one object's, by the labels of live nodes."""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest
from fake_cluster.queued_resources import PLACE, make_cloud_resource, make_resource
from fake_cluster.resource_world import ResourceWorld

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudQueuedResource, Place
from stepkeeper_operator.facts.queued_resource import read_queued_machines
from stepkeeper_operator.labels import QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.naming import CLUSTER_LABEL, UID_LABEL
from tpuapi.cloud import FakeCloud

BY_HAND = {"team": "blue"}
SLICES = {"count": 2}


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


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def made_by_hand(state: str = "ACTIVE", **spec: Any) -> CloudQueuedResource:
    made = make_cloud_resource(make_resource(**spec), state)
    node = {key: value for key, value in made.node.items() if key not in {"labels", "metadata"}}
    return replace(made, node={**node, "labels": BY_HAND})


def beside(world: ResourceWorld, service: Any = None, **spec: Any) -> ResourceWorld:
    """Make another cluster with an object of the same namespace and name, in the same cloud."""
    return ResourceWorld(service=service or world.cloud, cluster_id="another-cluster", now=world.now, **spec)


async def run_both(rounds: int, *worlds: ResourceWorld) -> None:
    for _ in range(rounds):
        for world in worlds:
            await world.reconcile()
            await world.reconcile()
        worlds[0].step()
        for world in worlds[1:]:
            world.now = worlds[0].now


def owners(world: ResourceWorld) -> set[str | None]:
    return {node.labels.get(CLUSTER_LABEL) for node in world.cloud.nodes.values()}


async def delete(world: ResourceWorld, *others: ResourceWorld) -> None:
    world.delete()
    await run_both(20, world, *others)
    assert world.raw is None


@pytest.mark.parametrize("spec", [{}, {"node": SLICES}], ids=["one slice", "two slices"])
def test_of_two_clusters_one_adopts_and_the_other_lets_it_be(spec: dict[str, Any]) -> None:
    async def story() -> None:
        first = ResourceWorld(**spec)
        first.cloud.add(made_by_hand(**spec))
        second = beside(first, **spec)
        await run_both(16, first, second)
        assert first.condition("Accepted") == ("True", "Accepted")
        assert first.status.bookkeeping.adopted
        assert second.condition("Accepted") == ("False", "NotOurs")
        assert owners(first) == {"cluster-uid"}
        assert all(node.labels["team"] == "blue" for node in first.cloud.nodes.values())
        assert await first.record_writes() == []
        assert await second.record_writes() == []
        await delete(second)
        assert first.cloud.resources[PLACE, "team-v5e"].state == "ACTIVE"
        await delete(first)
        assert not first.cloud.resources

    play(story())


def test_labels_that_come_late_win_and_the_earlier_one_lets_go() -> None:
    async def story() -> None:
        first = ResourceWorld()
        first.cloud.add(made_by_hand())
        late = LateCloud(first.cloud)
        second = beside(first, late)
        labelling = asyncio.create_task(second.run(1))
        await asyncio.wait_for(late.asked.wait(), 10)
        await run_both(8, first)
        assert owners(first) == {"cluster-uid"}
        assert not first.status.bookkeeping.created, "somebody else may still write"
        late.go.set()
        await labelling
        assert owners(first) == {"another-cluster"}
        second.now = first.now
        await run_both(16, first, second)
        assert first.condition("Accepted") == ("False", "NotOurs")
        assert second.condition("Accepted") == ("True", "Accepted")
        await delete(first, second)
        assert first.cloud.resources[PLACE, "team-v5e"].state == "ACTIVE"
        assert owners(first) == {"another-cluster"}

    play(story())


@pytest.mark.parametrize("leave", ["delete", "stay"])
def test_what_somebody_else_relabels_is_let_go_untouched(leave: str) -> None:
    async def story() -> None:
        world = ResourceWorld()
        world.cloud.add(made_by_hand())
        await world.run(14)
        assert world.status.bookkeeping.adopted
        requests: list[str] = []
        world.cloud.on_request = lambda verb, _id: requests.append(verb)
        for key, node in world.cloud.nodes.items():
            labels = {**node.labels, CLUSTER_LABEL: "another-cluster"}
            world.cloud.nodes[key] = replace(node, labels=labels)
        if leave == "delete":
            world.delete()
        await world.run(20)
        assert requests == []
        assert "LetGo" in world.events
        if leave == "delete":
            assert world.raw is None
        else:
            assert world.condition("Accepted") == ("False", "NotOurs")
            assert not world.status.bookkeeping.adopted

    play(story())


def test_what_has_no_nodes_yet_is_adopted_once_it_has() -> None:
    async def story() -> None:
        world = ResourceWorld()
        world.cloud.add(made_by_hand("WAITING_FOR_RESOURCES"))
        await world.reconcile()
        await world.reconcile()
        assert world.condition("Accepted") == ("Unknown", "Adopting")
        assert world.raw is not None
        accepted = next(c.message for c in world.status.conditions if c.type == "Accepted")
        assert accepted
        assert read_queued_machines(world.raw).obstacle == accepted
        assert not world.status.bookkeeping.created
        await world.run(25)
        assert world.status.state is QueuedResourceState.ACTIVE
        assert world.status.bookkeeping.adopted
        assert world.cloud.created == []

    play(story())


def test_a_deletion_before_that_leaves_it_alone() -> None:
    async def story() -> None:
        world = ResourceWorld()
        world.cloud.add(made_by_hand("WAITING_FOR_RESOURCES"))
        await world.reconcile()
        world.delete()
        await world.run(10)
        assert world.raw is None
        assert world.cloud.resources[PLACE, "team-v5e"].state != "DELETING"

    play(story())


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_what_has_ended_without_an_owner_is_told_and_left_alone(state: str) -> None:
    async def story() -> None:
        world = ResourceWorld()
        world.cloud.resources[PLACE, "team-v5e"] = made_by_hand(state)
        await world.run(5)
        assert world.condition("Accepted") == ("False", "NotAdoptable")
        assert world.cloud.resources[PLACE, "team-v5e"].state == state

    play(story())


def test_an_adopted_one_that_has_lost_its_nodes_is_made_anew() -> None:
    async def story() -> None:
        world = ResourceWorld()
        world.cloud.add(made_by_hand())
        await world.run(14)
        world.cloud.suspend("team-v5e")
        world.cloud.nodes.clear()
        await world.run(30)
        assert list(world.cloud.resources) == [(PLACE, "team-v5e-r1")]
        assert world.status.recreations == 1

    play(story())


def test_nodes_that_have_lost_their_labels_are_not_deleted_unasked() -> None:
    async def story() -> None:
        world = ResourceWorld()
        world.cloud.add(made_by_hand())
        await world.run(14)
        for key, node in world.cloud.nodes.items():
            world.cloud.nodes[key] = replace(node, labels={})
        world.delete()
        await world.run(10)
        assert world.cloud.resources[PLACE, "team-v5e"].state == "ACTIVE"
        active = next(c for c in world.status.conditions if c.type == "Active")
        assert "stepkeeper-cluster=cluster-uid" in active.message
        for key, node in world.cloud.nodes.items():
            given_back = {CLUSTER_LABEL: "cluster-uid", UID_LABEL: world.uid}
            world.cloud.nodes[key] = replace(node, labels=given_back)
        await world.run(20)
        assert world.raw is None
        assert not world.cloud.resources

    play(story())


def test_a_refusal_to_write_labels_is_told_in_the_clouds_words() -> None:
    async def story() -> None:
        world = ResourceWorld()
        world.cloud.add(made_by_hand())
        world.cloud.inject_error("UpdateNode", "PERMISSION_DENIED", message="no tpu.nodes.update")
        await world.run(4)
        accepted = next(c for c in world.status.conditions if c.type == "Accepted")
        assert (accepted.status, accepted.reason) == ("False", "Refused")
        assert "no tpu.nodes.update" in accepted.message
        assert not world.status.bookkeeping.adopted
        await world.run(40, seconds=100)
        assert world.status.bookkeeping.adopted
        assert world.status.error is None

    play(story())


def test_the_nodes_of_an_earlier_object_of_the_name_get_the_new_ones_labels() -> None:
    async def story() -> None:
        world = ResourceWorld(deletion_policy="Retain", node=SLICES)
        await world.run(14)
        for uid in ("uid-2", "uid-3"):
            world.delete()
            await world.run(2)
            assert world.raw is None
            world.make_object(uid, deletion_policy="Retain", node=SLICES)
            await world.run(8)
            assert {node.labels[UID_LABEL] for node in world.cloud.nodes.values()} == {uid}
            hosts = world.cluster.list_objects("nodes")
            assert {host["metadata"]["labels"][QUEUED_RESOURCE_UID_LABEL] for host in hosts} == {uid}
            assert world.condition("Accepted") == ("True", "Accepted")
            assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
        assert world.cloud.created == ["team-v5e"]

    play(story())


@pytest.mark.parametrize("deletes", [False, True])
def test_an_adoption_may_begin_with_a_refused_creation(*, deletes: bool) -> None:
    async def story() -> None:
        world = ResourceWorld()
        world.cloud.add(made_by_hand())
        world.cloud.unlisted = {"team-v5e"}
        await world.run(2)
        assert world.status.error is not None
        assert world.status.error.code == "ALREADY_EXISTS"
        world.cloud.unlisted = set()
        await world.run(4)
        assert world.condition("Accepted") == ("Unknown", "Adopting")
        if deletes:
            world.delete()
            await world.run(20)
            assert world.raw is None
            assert world.cloud.resources[PLACE, "team-v5e"].state == "ACTIVE"
            return
        await world.run(14)
        assert world.condition("Accepted") == ("True", "Accepted")
        assert world.status.bookkeeping.adopted
        assert world.status.error is None

    play(story())


@pytest.mark.parametrize("before", [True, False], ids=["not carried out", "carried out"])
def test_an_operator_that_is_killed_at_any_write_adopts_it_all_the_same(*, before: bool) -> None:
    async def story(kill_at: int) -> None:
        world = ResourceWorld(node=SLICES)
        world.cloud.add(made_by_hand(node=SLICES))
        world.kill_at, world.kill_before = kill_at, before
        await world.run(30)
        assert world.status.bookkeeping.adopted
        assert world.condition("Accepted") == ("True", "Accepted")
        assert world.cloud.created == []
        world.delete()
        await world.run(20)
        assert world.raw is None
        assert not world.cloud.resources

    for kill_at in range(8):
        play(story(kill_at))
