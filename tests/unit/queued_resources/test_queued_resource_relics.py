"""Test that a new object takes up what an object of the same namespace and name has left in the cloud."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from fake_cluster.queued_resources import (
    CLUSTER_ID,
    after,
    decide,
    find,
    make_cloud_resource,
    make_node,
    make_resource,
    observe,
)
from fake_cluster.resource_world import ResourceWorld

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.labels import QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.naming import make_labels

NOT_ADOPTABLE = {
    "another cluster": {"stepkeeper-cluster": "another"},
    "another namespace": {"stepkeeper-namespace": "another"},
    "another name": {"stepkeeper-name": "another"},
    "no name": {"stepkeeper-name": None},
    "no cluster": {"stepkeeper-cluster": None},
}


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


async def retained(preemptions: int = 0) -> ResourceWorld:
    """Make one, let it be preempted so many times, and delete its object so that the machines stay."""
    world = ResourceWorld(deletion_policy="Retain")
    await world.run(12)
    for _ in range(preemptions):
        world.cloud.set_nodes("PREEMPTED")
        await world.run(40)
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
    world.delete()
    await world.run(2)
    assert world.raw is None
    assert len(world.cloud.resources) == 1
    return world


@pytest.mark.parametrize("preemptions", [0, 1])
@pytest.mark.parametrize("restart", [True, False], ids=["restarted", "not restarted"])
def test_what_was_retained_is_taken_up_by_the_next_object_of_the_name(
    preemptions: int, *, restart: bool
) -> None:
    async def story() -> None:
        world = await retained(preemptions)
        created = list(world.cloud.created)
        world.make_object(uid="uid-2")
        await world.run(3)
        if restart:
            world.restart_operator()
        await world.run(3)
        assert world.cloud.created == created
        assert world.status.state is QueuedResourceState.ACTIVE
        assert world.condition("Accepted") == ("True", "Accepted")
        assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
        (node,) = world.cluster.list_objects("nodes")
        assert node["metadata"]["labels"][QUEUED_RESOURCE_UID_LABEL] == "uid-2"
        assert await world.record_writes() == []
        world.delete()
        await world.run(20)
        assert world.raw is None
        assert not world.cloud.resources
        assert not world.cluster.list_objects("nodes")

    play(story())


def test_an_emptied_status_takes_it_up_again() -> None:
    async def story() -> None:
        world = await retained(1)
        world.make_object(uid="uid-2")
        await world.run(4)
        raw = world.raw
        assert raw is not None
        world.cluster.put("queuedresources", {key: raw[key] for key in raw if key != "status"})
        await world.run(4)
        assert world.status.state is QueuedResourceState.ACTIVE
        assert world.status.bookkeeping.number == 1
        assert len(world.cloud.created) == 2

    play(story())


def test_what_it_left_is_made_anew_under_the_next_number() -> None:
    async def story() -> None:
        world = await retained()
        world.make_object(uid="uid-2")
        await world.run(4)
        world.cloud.set_nodes("PREEMPTED")
        await world.run(40)
        assert world.cloud.created == ["team-v5e", "team-v5e-r1"]
        assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
        assert [r.node["labels"]["stepkeeper-uid"] for r in world.cloud.resources.values()] == ["uid-2"]

    play(story())


@pytest.mark.parametrize("number", [0, 2])
def test_what_differs_is_told_and_left_alone(number: int) -> None:
    resource = make_resource(node={"acceleratorType": "v5litepod-16"})
    made = make_cloud_resource(make_resource(), "ACTIVE")
    cloud_id = "team-v5e" if number == 0 else f"team-v5e-r{number}"
    labels = {**made.node["labels"], "stepkeeper-uid": "uid-0"}
    relic = replace(made, id=cloud_id, node_ids=(cloud_id,), node={**made.node, "labels": labels})
    decision = decide(resource, observe(relic, nodes=[make_node(relic)]))
    accepted = find(decision, "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "Differs")
    assert "v5litepod-16" in accepted.message
    assert "earlier object" in accepted.message
    assert decision.actions == ()


def test_another_startup_script_is_no_difference_once_the_machines_are_there() -> None:
    resource = make_resource(node={"startupScriptSecretRef": {"name": "join"}})
    made = make_cloud_resource(resource, "ACTIVE")
    labels = {**made.node["labels"], "stepkeeper-uid": "uid-0"}
    metadata = {**made.node["metadata"], "startup-script": "with an old token"}
    relic = replace(made, node={**made.node, "labels": labels, "metadata": metadata})
    decision = decide(resource, observe(relic, nodes=[make_node(relic)], script="with a new token"))
    assert decision.status.bookkeeping.adopted


@pytest.mark.parametrize("labels", NOT_ADOPTABLE.values(), ids=NOT_ADOPTABLE)
@pytest.mark.parametrize("number", [0, 2])
def test_nothing_of_anybody_else_is_taken_up(labels: dict[str, str | None], number: int) -> None:
    resource = make_resource()
    made = make_cloud_resource(resource, "ACTIVE")
    known = {**make_labels(resource.metadata, CLUSTER_ID), "stepkeeper-uid": "uid-0", **labels}
    node = {**made.node, "labels": {key: value for key, value in known.items() if value is not None}}
    cloud_id = "team-v5e" if number == 0 else f"team-v5e-r{number}"
    other = replace(made, id=cloud_id, node=node, node_ids=(cloud_id,))
    decision = decide(resource, observe(other, nodes=[make_node(other)]))
    assert not decision.status.bookkeeping.adopted
    if number == 0:
        assert find(decision, "Accepted").reason == "NotOurs"
        again = decide(after(resource, decision), observe(other))
        assert again.actions == ()
