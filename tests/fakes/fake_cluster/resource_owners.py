"""Play what happens to a QueuedResource and to cloud resources that aren't its own: stories in words."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from fake_cluster.queued_resources import make_cloud_resource, make_resource
from fake_cluster.resource_world import ResourceWorld
from fake_cluster.stories import ANY_STEPS, play_steps, same
from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource
from stepkeeper_operator.cloud_tpu.naming import UID_LABEL

BY_HAND: Final = {"team": "blue"}
THEIRS: Final = {
    "stepkeeper-cluster": "another",
    "stepkeeper-namespace": "x",
    "stepkeeper-name": "y",
    "stepkeeper-uid": "z",
}
JOINED: Final = "condition NodesJoined True/AllHostsJoined"
OTHERS: Final = "condition Accepted False/OwnedByOther"


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


async def adopting(labels: Mapping[str, str] = BY_HAND, **options: Any) -> ResourceWorld:
    """Make a world whose object has adopted what is there by hand."""
    world = await tell(beside(labels=labels, **options), "run 8, condition Accepted True/Accepted")
    assert world.status.operator.adopted
    return world


def record_requests(world: ResourceWorld) -> list[str]:
    """Record what is asked of the cloud from now on."""
    asked: list[str] = []
    world.cloud.on_request = lambda verb, cloud_id: asked.append(f"{verb} {cloud_id}")
    return asked


def owners(world: ResourceWorld) -> set[str | None]:
    """Return the uids in the labels of all machines."""
    return {node.labels.get(UID_LABEL) for node in world.cloud.nodes.values()}


def take_nodes(world: ResourceWorld) -> None:
    """Label the nodes as another cluster would that adopts it."""
    for key, node in world.cloud.nodes.items():
        world.cloud.nodes[key] = replace(node, labels=THEIRS)


async def run_all(rounds: int, *worlds: ResourceWorld) -> None:
    """Let the operators of several clusters act in turn."""
    for _ in range(rounds):
        for world in worlds:
            await world.reconcile()
            await world.reconcile()
        worlds[0].step()
        for world in worlds[1:]:
            world.now = worlds[0].now


async def tell(world: ResourceWorld, story: str, **own: Callable[..., object]) -> ResourceWorld:
    """Play a story with the steps of this module and the test's own, and return its world."""
    await play_steps(world, story, STEPS | own)
    return world


def _fail(world: ResourceWorld, method: str, code: str, times: str = "always") -> None:
    world.cloud.inject_error(method, code, None if times == "always" else int(times), message="in its words")


def _check_nothing_left(world: ResourceWorld) -> None:
    same(world.raw, None)
    same(dict(world.cloud.resources), {})
    same(world.hosts, [])


STEPS: Final[dict[str, Callable[..., object]]] = ANY_STEPS | {
    "run": lambda world, rounds, seconds="10": world.run(int(rounds), float(seconds)),
    "delete": lambda world: world.delete(),
    "annotate": lambda world, adopt="": world.annotate(adopt or None),
    "preempt": lambda world: world.cloud.set_nodes("PREEMPTED"),
    "suspend": lambda world, cloud_id="team-v5e": world.cloud.suspend(cloud_id),
    "take": take_nodes,
    "hide": lambda world, *ids: world.cloud.unlisted.update(ids),
    "show": lambda world: world.cloud.unlisted.clear(),
    "stay": lambda world, cloud_id="team-v5e": world.cloud.stays.add(cloud_id),
    "fail": _fail,
    "recover": lambda world: world.cloud.clear_faults(),
    "state": lambda world, state: same(world.status.state, state),
    "created": lambda world, *ids: same(world.cloud.created, list(ids)),
    "ours": lambda world, *ids: same(world.ours, list(ids)),
    "there": lambda world, *ids: same([cloud_id for _, cloud_id in world.cloud.resources], list(ids)),
    "hosts": lambda world, *names: same(world.hosts, list(names)),
    "recreations": lambda world, count: same(world.status.recreations, int(count)),
    "exists": lambda world: same(world.raw is None, False),
    "gone": lambda world: same(world.raw, None),
    "nothing-left": _check_nothing_left,
}
"""What can happen to a QueuedResource, and what can be checked of it."""
