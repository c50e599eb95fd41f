"""Test that cloud resources of this cluster whose object is gone are told, and left alone."""

import logging
from dataclasses import replace

import pytest

from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.queued_resources.naming import CLUSTER_LABEL, NAME_LABEL, UID_LABEL

GAUGE = 'stepkeeper_queued_resource_orphans{project="my-project",zone="us-central2-b"}'


def add_twin(world: ResourceWorld, cloud_id: str, **labels: str) -> None:
    """Add a cloud resource as the world's own one, with other labels."""
    (ours,) = [each for each in world.cloud.resources.values() if each.id == "team-v5e"]
    node = {**ours.node, "labels": {**ours.node["labels"], **labels}}
    world.cloud.add(replace(ours, id=cloud_id, node=node))


def count(world: ResourceWorld) -> float:
    lines = world.metrics.render().decode().splitlines()
    return float(next(line for line in lines if line.startswith(GAUGE)).rpartition(" ")[2])


async def test_what_has_no_object_any_more_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = ResourceWorld()
    await world.run(12)
    assert count(world) == 0
    add_twin(world, "team-old", **{UID_LABEL: "gone", NAME_LABEL: "old"})
    with caplog.at_level(logging.WARNING):
        world.now += 300
        await world.run(12, seconds=60)
    assert count(world) == 1
    told = [record for record in caplog.records if "whose object is gone" in record.message]
    assert [vars(record)["resource"].rpartition("/")[2] for record in told] == ["team-old"]
    assert "team-old" in [each.id for each in world.cloud.resources.values()]


async def test_what_is_another_clusters_is_no_orphan() -> None:
    world = ResourceWorld()
    await world.run(12)
    add_twin(world, "other", **{CLUSTER_LABEL: "another", UID_LABEL: "gone", NAME_LABEL: "old"})
    world.now += 300
    await world.run(6, seconds=60)
    assert count(world) == 0
