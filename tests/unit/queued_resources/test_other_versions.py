"""Test QueuedResources of another version: a status is read as far as it can be, and an unreadable spec is reported."""

from typing import Any

import pytest

from fake_cluster.resource_owners import tell
from fake_cluster.resource_world import ResourceWorld, active
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


@pytest.mark.parametrize("newer", NEWER_STATUSES.values(), ids=NEWER_STATUSES)
async def test_a_status_of_a_newer_operator_keeps_nothing_from_being_managed(newer: dict[str, Any]) -> None:
    world = await active()
    change(world, "status", newer)
    await tell(world, "restart, run 4, state Active, created team-v5e, delete, run 20, nothing-left")


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
    await tell(world, "run 4, events UnreadableSpec 1, rests")
    assert (accepted(world)["status"], accepted(world)["reason"]) == ("False", "UnreadableSpec")
    assert said in accepted(world)["message"]
    assert world.cloud.resources == before
    change(world, part, readable)
    await tell(world, "run 4, condition Accepted True/Accepted")


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
        await tell(world, "preempt, run 20")
        assert (world.status.operator.number, world.status.operator.created) == (1, False)
    assert world.raw is not None
    world.cluster.put("queuedresources", world.raw | {"spec": {"project": 1, "newField": {}}})
    await tell(world, "delete, run 20, nothing-left")


@pytest.mark.parametrize(
    "spec", [{"tier": {"flexStart": {"maxRunSeconds": 3600}}}, {"queueing": {"validUntilIdle": True}}]
)
async def test_a_choice_that_is_not_known_buys_nothing_and_leaves_machines_alone(
    spec: dict[str, Any],
) -> None:
    world = ResourceWorld()
    change(world, "spec", spec)
    await tell(world, "run 6, created")
    assert (accepted(world)["status"], accepted(world)["reason"]) == ("False", "UnreadableSpec")
    assert "and this operator doesn't know" in accepted(world)["message"]
    world = await active(updatePolicy="Recreate")
    before = dict(world.cloud.resources)
    change(world, "spec", spec)
    await tell(world, "restart, run 6")
    assert world.cloud.resources == before
    await tell(world, "delete, run 20, nothing-left")


async def test_what_stays_gone_keeps_the_hash_of_a_newer_operator_which_finds_nothing_changed() -> None:
    world = await active(recreatePolicy={"onFailed": "Recreate", "max": 0})
    use_newer_hash(world)
    world.cloud.resources.clear()
    world.cloud.nodes.clear()
    await tell(world, "run 20, state Gone, ours")
    assert world.status.operator.spec_hash == "newer"


async def test_a_hash_of_a_newer_operator_deletes_no_machines() -> None:
    world = await active(updatePolicy="Recreate")
    before, slices = dict(world.cloud.resources), world.resource.spec.slices.to_raw()
    use_newer_hash(world)
    await tell(world, "restart, run 6")
    assert world.cloud.resources == before
    assert world.condition("Degraded") == ("True", "UnknownFields")
    change(world, "spec", {"slices": slices | {"count": 2}})
    await world.run(20)
    assert world.cloud.resources != before, "an edit takes effect once all fields are known"
