"""Test QueuedResources of another version: a status is read as far as it can be, and an unreadable spec is told."""

from typing import Any

import pytest

from fake_cluster.resource_world import ResourceWorld

NEWER_STATUSES: dict[str, dict[str, Any]] = {
    "a state": {"state": "Repairing"},
    "an initiator": {"stateInitiator": "SCHEDULER"},
    "a longer word for a node's state": {"nodes": [{"name": "team-v5e", "state": "Repairing" * 9}]},
}
NEWER_BOOKKEEPING = {"bookkeeping": {"number": "the third", "created": True}}


def change(world: ResourceWorld, part: str, changes: dict[str, Any]) -> None:
    raw = world.raw
    assert raw is not None
    world.cluster.put("queuedresources", raw | {part: raw[part] | changes})


def accepted(world: ResourceWorld) -> dict[str, Any]:
    assert world.raw is not None
    return next(dict(c) for c in world.raw["status"]["conditions"] if c["type"] == "Accepted")


@pytest.mark.parametrize("newer", NEWER_STATUSES.values(), ids=NEWER_STATUSES)
async def test_a_status_of_a_newer_operator_keeps_nothing_from_being_managed(newer: dict[str, Any]) -> None:
    world = ResourceWorld()
    await world.run(12)
    change(world, "status", newer)
    world.restart_operator()
    await world.run(4)
    assert world.raw is not None
    assert world.raw["status"]["state"] == "Active"
    assert len(world.cloud.created) == 1
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert world.ours == []


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [("spec", {"node": {"acceleratorType": ["v9"]}}, "spec.node"), ("status", NEWER_BOOKKEEPING, "number")],
)
async def test_what_can_not_be_read_is_told_and_its_machines_are_left_alone(
    part: str, changes: dict[str, Any], said: str
) -> None:
    world = ResourceWorld()
    await world.run(12)
    before = dict(world.cloud.resources)
    change(world, part, changes)
    await world.run(4)
    assert (accepted(world)["status"], accepted(world)["reason"]) == ("False", "UnreadableSpec")
    assert said in accepted(world)["message"]
    assert world.events.count("UnreadableSpec") == 1
    assert world.cloud.resources == before
    assert await world.record_writes() == []


async def test_a_spec_that_can_be_read_again_is_accepted_again() -> None:
    world = ResourceWorld()
    await world.run(12)
    assert world.raw is not None
    spec = world.raw["spec"]
    change(world, "spec", {"node": "here"})
    await world.run(2)
    change(world, "spec", spec)
    await world.run(4)
    assert world.condition("Accepted") == ("True", "Accepted")
