"""Name what can happen to a QueuedResource: in the cloud, to the operator, and by people's hands."""

from collections.abc import Callable
from typing import Final

from cloud_stories.world import StoryWorld
from hypothesis import strategies as st

from stepkeeper_operator.errors import ApiError as ClusterError

CODES: Final = (
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
    "FAILED_PRECONDITION",
    "UNAUTHENTICATED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
)
_PASSING: Final = 3
"""Codes that don't tell what became of the request: it may have been carried out."""

_FAMILY: Final = "v5litepod"
Happening = Callable[[StoryWorld, int], object]


def heal(world: StoryWorld) -> None:
    """Let all faults pass."""
    cloud = world.cloud
    cloud.clear_faults()
    cloud.unlisted.clear()
    cloud.set_capacity(_FAMILY, None)
    cloud.set_quota(_FAMILY, None)
    cloud.quota_refused_at_call, cloud.preempted_nodes_linger = True, False
    world.cluster.refusals.clear()
    world.kill_at = None


def _fail(world: StoryWorld, method: str, index: int) -> None:
    number = index % len(CODES)
    after_commit = number < _PASSING and index >= len(CODES)
    times = 1 + index % 3
    world.cloud.inject_error(method, CODES[number], times, after_commit=after_commit, resource="v5e")


def _fail_list(world: StoryWorld, index: int) -> None:
    world.cloud.inject_error(
        "ListNodes" if index % 2 else "ListQueuedResources", CODES[index % len(CODES)], 2
    )


def _preempt(world: StoryWorld, index: int, state: str = "PREEMPTED") -> None:
    ready = [node for node in world.machines if node.state == "READY"]
    if ready:
        world.reasons |= {"Preempted", "Suspended"}
        world.cloud.preempt(ready[index % len(ready)].id, state)


def _suspend(world: StoryWorld, index: int) -> None:
    for cloud_id in world.names_in_cloud():
        world.reasons |= {"Suspended", "Preempted"}
        world.cloud.suspend(cloud_id, "USER" if index % 2 else "SERVICE")


def _fail_resource(world: StoryWorld, code: str) -> None:
    for cloud_id in world.names_in_cloud():
        world.reasons |= {"Failed", "QuotaExhausted", "Preempted"}
        world.cloud.fail(cloud_id, code, "it broke")


def _announce(world: StoryWorld, index: int) -> None:
    ready = [node for node in world.machines if node.state == "READY"]
    if not ready:
        return
    ends_in = ("REPAIRING", "TERMINATED", "PREEMPTED")[index % 3]
    if ends_in != "REPAIRING":
        world.reasons |= {"Preempted", "Suspended"}
    world.cloud.announce_maintenance(
        ready[index % len(ready)].id, starts_in_s=60.0 * index, lasts_s=300, ends_in=ends_in
    )


def delete_by_hand(world: StoryWorld, *cloud_ids: str) -> None:
    """Delete these from the cloud as somebody else would; by default all that are the object's."""
    for cloud_id in cloud_ids or world.names_in_cloud():
        world.reasons |= {"Vanished", "Preempted"}
        world.cloud.delete(cloud_id)


def _delete_node(world: StoryWorld, index: int) -> None:
    machines = world.machines
    if machines:
        world.reasons |= {"Preempted", "Suspended"}
        world.cloud.delete_node(machines[index % len(machines)].id)


def _lack_quota(world: StoryWorld, index: int) -> None:
    world.reasons.add("QuotaExhausted")
    world.cloud.quota_refused_at_call = bool(index % 2)
    world.cloud.set_quota(_FAMILY, 8 * (index % 4))


def _hide(world: StoryWorld, index: int) -> None:
    """Let lists leave out what is the object's, or show it again."""
    names = sorted({*world.names_in_cloud(), *(node.id for node in world.machines)})
    world.cloud.unlisted = set(names[index % 2 :]) if index < 8 else set()


def _kill(world: StoryWorld, index: int) -> None:
    world.kill_at, world.kill_before = index // 2, bool(index % 2)


def _edit(world: StoryWorld, index: int) -> None:
    """Change the machines, which the API server allows under one policy only."""
    if world.raw is None or world.resource.spec.update_policy != "Recreate":
        return
    world.reasons.add("SpecChanged")
    topology = ("2x2", "2x4", "4x4")[index % 3]
    world.edit(slices={**world.raw["spec"]["slices"], "topology": topology})


def _forget_status(world: StoryWorld) -> None:
    raw = world.raw
    if raw is not None:
        world.cluster.put("queuedresources", {key: raw[key] for key in raw if key != "status"})


def _refuse_node_writes(world: StoryWorld, index: int) -> None:
    """Let a webhook, say, refuse cordons and labels, or deletions."""
    for verb in (("patch",), ("delete",), ("patch", "delete"))[index % 3]:
        world.cluster.refusals[verb, "nodes"] = ClusterError(403, "an admission webhook says no")


def _run_pod(world: StoryWorld) -> None:
    for raw in world.cluster.list_objects("nodes")[:1]:
        world.add_pod(raw["metadata"]["name"])


def _wait(world: StoryWorld, seconds: float) -> None:
    if world.raw is not None and world.resource.spec.queueing is not None:
        world.reasons.add("Expired")
    world.step(seconds)


HAPPENINGS: Final[dict[str, Happening]] = {
    "a list fails": _fail_list,
    "a creation fails": lambda world, index: _fail(world, "CreateQueuedResource", index),
    "a deletion fails": lambda world, index: _fail(world, "DeleteQueuedResource", index),
    "deletions come to nothing": lambda world, index: world.cloud.fail_deletions(
        CODES[index % len(CODES)], 1 + index % 6
    ),
    "writes to nodes are refused": _refuse_node_writes,
    "operations can't be read": lambda world, index: world.cloud.inject_error(
        "GetOperation", CODES[index % len(CODES)], 1 + index
    ),
    "something can't be read by its name": lambda world, index: _fail(
        world, "GetNode" if index % 2 else "GetQueuedResource", index
    ),
    "lists leave something out": _hide,
    "the cloud goes on": lambda world, index: _wait(world, 5.0 * index),
    "time passes": lambda world, index: _wait(world, 60.0 * (index + 1)),
    "there is no capacity": lambda world, _index: world.cloud.set_capacity(_FAMILY, 0),
    "there is capacity": lambda world, _index: world.cloud.set_capacity(_FAMILY, None),
    "there is little quota": _lack_quota,
    "there is quota": lambda world, _index: world.cloud.set_quota(_FAMILY, None),
    "it is suspended": _suspend,
    "it fails": lambda world, _index: _fail_resource(world, "INTERNAL"),
    "it fails for quota": lambda world, _index: _fail_resource(world, "RESOURCE_EXHAUSTED"),
    "a node is preempted": _preempt,
    "a node is terminated": lambda world, index: _preempt(world, index, "TERMINATED"),
    "preempted nodes stay": lambda world, _index: setattr(world.cloud, "preempted_nodes_linger", True),
    "maintenance is announced": _announce,
    "somebody deletes it in the cloud": lambda world, _index: delete_by_hand(world),
    "somebody deletes a node in the cloud": _delete_node,
    "the operator is killed": _kill,
    "the operator is restarted": lambda world, _index: world.restart_operator(),
    "the spec is changed": _edit,
    "the status is lost": lambda world, _index: _forget_status(world),
    "a pod runs": lambda world, _index: _run_pod(world),
}

stories = st.lists(
    st.tuples(st.sampled_from(sorted(HAPPENINGS)), st.integers(0, 17), st.integers(0, 4)), max_size=16
)
