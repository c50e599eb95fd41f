"""Make cloud resources that aren't the object's, and tell whose nodes are."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from fake_cluster.queued_resources import make_cloud_resource, make_resource
from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource
from stepkeeper_operator.cloud_tpu.naming import UID_LABEL

__all__ = ["BY_HAND", "THEIRS", "adopting", "beside", "made", "owners", "record_requests", "run_all"]

BY_HAND: Final = {"team": "blue"}
THEIRS: Final = {
    "stepkeeper-cluster": "another",
    "stepkeeper-namespace": "x",
    "stepkeeper-name": "y",
    "stepkeeper-uid": "z",
}


def made(
    labels: Mapping[str, str] = BY_HAND, state: str = "ACTIVE", cloud_id: str = "team-v5e", **spec: Any
) -> CloudQueuedResource:
    """Make a cloud resource that isn't the object's."""
    asked = make_cloud_resource(make_resource(**spec), state)
    node = {key: value for key, value in asked.node.items() if key != "metadata"}
    node_ids = tuple(name.replace("team-v5e", cloud_id) for name in asked.node_ids)
    return replace(asked, id=cloud_id, node_ids=node_ids, node={**node, "labels": dict(labels)})


def beside(cloud_id: str = "team-v5e", labels: Mapping[str, str] = BY_HAND, **options: Any) -> ResourceWorld:
    """Make a world whose object names what is there by hand."""
    world = ResourceWorld(adopt=cloud_id, **options)
    spec = {"slices": options["slices"]} if "slices" in options else {}
    world.cloud.add(made(labels, cloud_id=cloud_id, **spec))
    return world


def record_requests(world: ResourceWorld) -> list[str]:
    asked: list[str] = []
    world.cloud.on_request = lambda verb, cloud_id: asked.append(f"{verb} {cloud_id}")
    return asked


def owners(world: ResourceWorld) -> set[str | None]:
    return {node.labels.get(UID_LABEL) for node in world.cloud.nodes.values()}


async def run_all(rounds: int, *worlds: ResourceWorld) -> None:
    """Let the operators of several clusters act in turn."""
    for _ in range(rounds):
        for world in worlds:
            await world.reconcile()
            await world.reconcile()
        worlds[0].step()
        for world in worlds[1:]:
            world.now = worlds[0].now


async def adopting(labels: Mapping[str, str] = BY_HAND, **options: Any) -> ResourceWorld:
    world = beside(labels=labels, **options)
    await world.run(8)
    assert world.status.operator.adopted
    assert world.condition("Accepted") == ("True", "Accepted")
    return world
