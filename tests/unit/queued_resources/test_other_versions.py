"""Test QueuedResources of another version: a status is read as far as it can be, and an unreadable spec is told."""

from typing import Any

import pytest

from fake_cluster.resource_world import ResourceWorld, active
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.errors import InvalidObjectError

NEWER_STATUSES: dict[str, dict[str, Any]] = {
    "a state": {"state": "Repairing"},
    "no private state": {"operator": {}},
    "an initiator": {"stateInitiator": "SCHEDULER"},
    "a longer word for a node's state": {"slices": [{"name": "team-v5e", "state": "Repairing" * 9}]},
}
NEWER_STATE = {"operator": {"number": "the third", "created": True}}


def change(world: ResourceWorld, part: str, changes: dict[str, Any]) -> None:
    raw = world.raw
    assert raw is not None
    world.cluster.put("queuedresources", raw | {part: raw[part] | changes})


def use_newer_hash(world: ResourceWorld) -> None:
    """Let a newer operator have noted its hash of the spec, and the user use one of its fields."""
    operator = world.status.operator.model_copy(update={"spec_hash": "newer"}).to_raw()
    change(world, "status", {"operator": operator})
    change(world, "spec", {"slices": world.resource.spec.slices.to_raw() | {"bootDisk": {"size": 5}}})


def accepted(world: ResourceWorld) -> dict[str, Any]:
    assert world.raw is not None
    return next(dict(c) for c in world.raw["status"]["conditions"] if c["type"] == "Accepted")


async def delete(world: ResourceWorld) -> None:
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert not world.cloud.resources


@pytest.mark.parametrize("newer", NEWER_STATUSES.values(), ids=NEWER_STATUSES)
async def test_a_status_of_a_newer_operator_keeps_nothing_from_being_managed(newer: dict[str, Any]) -> None:
    world = await active()
    change(world, "status", newer)
    world.restart_operator()
    await world.run(4)
    assert world.raw is not None
    assert world.raw["status"]["state"] == "Active"
    assert len(world.cloud.created) == 1
    await delete(world)


async def test_machines_go_with_an_object_whose_private_status_is_lost() -> None:
    world = await active()
    change(world, "status", {"operator": {}})
    world.restart_operator()
    await delete(world)


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [("spec", {"slices": {"accelerator": ["v9"]}}, "spec.slices"), ("status", NEWER_STATE, "number")],
)
async def test_what_can_not_be_read_is_told_and_its_machines_are_left_alone(
    part: str, changes: dict[str, Any], said: str
) -> None:
    world = await active()
    before = dict(world.cloud.resources)
    assert world.raw is not None
    readable = world.raw[part]
    change(world, part, changes)
    await world.run(4)
    assert (accepted(world)["status"], accepted(world)["reason"]) == ("False", "UnreadableSpec")
    assert said in accepted(world)["message"]
    assert world.events.count("UnreadableSpec") == 1
    assert world.cloud.resources == before
    assert await world.record_writes() == []
    change(world, part, readable)
    await world.run(4)
    assert world.condition("Accepted") == ("True", "Accepted")


async def test_an_unreadable_object_with_which_no_status_is_kept_is_logged_and_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await active()
    change(world, "spec", {"slices": {"accelerator": ["v9"]}})
    world.cluster.refusals["apply", "queuedresources"] = InvalidObjectError(422, "spec.slices: Invalid value")
    assert await world.reconcile() is None
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "spec.slices.accelerator" in record.__dict__["problems"]
    assert accepted(world)["status"] == "True"


@pytest.mark.parametrize("between_two", [True, False], ids=["between two cloud resources", "active"])
async def test_what_can_not_be_read_is_deleted_all_the_same(*, between_two: bool) -> None:
    world = await active(recreate_policy={"backoff": {"initialSeconds": 5000, "maxSeconds": 5000}})
    if between_two:
        world.cloud.set_nodes("PREEMPTED")
        await world.run(20)
        assert (world.status.operator.number, world.status.operator.created) == (1, False)
    assert world.raw is not None
    world.cluster.put("queuedresources", world.raw | {"spec": {"project": 1, "newField": {}}})
    await delete(world)


UNKNOWN_CHOICES: dict[str, dict[str, Any]] = {
    "tier.flexStart": {"tier": {"flexStart": {"maxRunSeconds": 3600}}},
    "starts.validUntilIdle": {"queueing": {"validUntilIdle": True}},
}


@pytest.mark.parametrize("spec", UNKNOWN_CHOICES.values(), ids=UNKNOWN_CHOICES)
async def test_a_choice_that_is_not_known_buys_nothing_and_leaves_machines_alone(
    spec: dict[str, Any],
) -> None:
    world = ResourceWorld()
    change(world, "spec", spec)
    await world.run(6)
    assert world.cloud.created == []
    assert (accepted(world)["status"], accepted(world)["reason"]) == ("False", "UnreadableSpec")
    assert "and this operator doesn't know" in accepted(world)["message"]
    world = await active(updatePolicy="Recreate")
    before = dict(world.cloud.resources)
    change(world, "spec", spec)
    world.restart_operator()
    await world.run(6)
    assert world.cloud.resources == before
    await delete(world)


async def test_what_stays_gone_keeps_the_hash_of_a_newer_operator_which_finds_nothing_changed() -> None:
    world = await active(recreatePolicy={"onFailed": "Recreate", "max": 0})
    use_newer_hash(world)
    world.cloud.resources.clear()
    world.cloud.nodes.clear()
    await world.run(20)
    assert world.status.state is QueuedResourceState.GONE
    assert world.status.operator.spec_hash == "newer"
    assert world.ours == []


async def test_a_hash_of_a_newer_operator_deletes_no_machines() -> None:
    world = await active(updatePolicy="Recreate")
    before, slices = dict(world.cloud.resources), world.resource.spec.slices.to_raw()
    use_newer_hash(world)
    world.restart_operator()
    await world.run(6)
    assert world.cloud.resources == before
    assert world.condition("Degraded") == ("True", "UnknownFields")
    change(world, "spec", {"slices": slices | {"count": 2}})
    await world.run(20)
    assert world.cloud.resources != before, "an edit takes effect once all fields are known"
