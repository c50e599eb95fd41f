"""Test over random stories that no object ever has two cloud resources, and that each comes to what it should be.

The cloud is the one of tests/tpuapi: its states, quotas and refusals are the service's, not the stories'.
"""

import asyncio
from typing import Any

from cloud_stories.happenings import HAPPENINGS, delete_by_hand, heal, stories
from cloud_stories.world import StoryWorld
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from thoroughness import scaled

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState

ENDED = {"Suspended", "Failed", "Preempted", "Expired", "RecreationsExhausted", "Gone"}
PACES_S = (1, 8, 30)
"""Seconds between two looks: sooner than a list is asked for anew, and later."""

Story = list[tuple[str, int, int]]
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    tier = draw(st.sampled_from(("guaranteed", "spot", "bestEffort")))
    slices: dict[str, Any] = {"count": draw(st.integers(1, 3))}
    checkpointed = draw(st.sampled_from((None, True, False)))
    if checkpointed is not None:
        slices["autocheckpointEnabled"] = checkpointed
    spec: dict[str, Any] = {
        "tier": {tier: {}},
        "slices": slices,
        "update_policy": draw(st.sampled_from(("Recreate", "Refuse"))),
        "deletion_policy": draw(st.sampled_from(("Delete", "Retain"))),
        "recreate_policy": draw(
            st.sampled_from(({}, {}, {"onSuspended": "Keep"}, {"onFailed": "Keep"}, {"max": 0}, {"max": 1}))
        ),
    }
    if draw(st.booleans()):
        spec["queueing"] = {"validUntilSeconds": 4000}
    return spec


async def play(world: StoryWorld, story: Story) -> None:
    for name, index, rounds in story:
        HAPPENINGS[name](world, index)
        for _ in range(rounds):
            await world.reconcile()
            world.step(PACES_S[index % len(PACES_S)])


async def rest(world: StoryWorld) -> None:
    """Let all faults pass, and then the waits and back-offs: five hours at most."""
    heal(world)
    if world.raw is not None and world.resource.spec.queueing is not None:
        world.reasons.add("Expired")
    for _ in range(45):
        for _ in range(2):
            await world.reconcile()
        world.step(400)


def has_ended(world: StoryWorld) -> bool:
    """It will never be active again, its policy keeps it so, and people are told."""
    status, reason = world.condition("Degraded") or ("", "")
    return status == "True" and reason in ENDED


RECREATED = {"update_policy": "Recreate"}
FAILED_AND_FORGOTTEN: Story = [
    ("a deletion fails", 0, 2),
    ("a creation fails", 0, 3),
    ("time passes", 2, 4),
    ("it fails", 0, 4),
    ("the status is lost", 0, 0),
]
PREEMPTED_AND_FORGOTTEN: Story = [
    ("a creation fails", 12, 0),
    ("there is quota", 0, 2),
    ("there is no capacity", 11, 4),
    ("there is little quota", 0, 2),
    ("a node is preempted", 0, 0),
    ("deletions come to nothing", 11, 0),
    ("there is capacity", 17, 0),
    ("time passes", 3, 0),
    ("a creation fails", 0, 0),
    ("the status is lost", 0, 0),
]
CHANGED_AND_FORGOTTEN: Story = [
    ("a creation fails", 0, 3),
    ("the spec is changed", 0, 0),
    ("a creation fails", 1, 4),
    ("the status is lost", 0, 0),
]


@settings(max_examples=scaled(40), deadline=None, suppress_health_check=slow)
@given(spec=specs(), story=stories, adopted=st.booleans())
@example(spec={}, story=[("a creation fails", 9, 1), ("the spec is changed", 1, 4)], adopted=False)
@example(spec=RECREATED, story=FAILED_AND_FORGOTTEN, adopted=False)
@example(
    spec={**RECREATED, "tier": {"guaranteed": {}}, "slices": {"count": 3}, "recreate_policy": {}},
    story=PREEMPTED_AND_FORGOTTEN,
    adopted=True,
)
@example(spec=RECREATED, story=CHANGED_AND_FORGOTTEN, adopted=True)
def test_a_resource_that_could_become_active_does(
    spec: dict[str, Any], story: Story, *, adopted: bool
) -> None:
    async def run() -> None:
        world = StoryWorld(**spec)
        await world.settle_in(adopted=adopted)
        await play(world, story)
        await rest(world)
        stuck = {
            ("False", "SpecMismatch"),
            ("Unknown", "Adopting"),
            ("False", "OwnedByOther"),
            ("False", "NothingToAdopt"),
        }
        if world.condition("Accepted") in stuck:
            assert adopted, "it was made for this spec"
            if world.condition("Accepted") != ("False", "SpecMismatch"):
                forgotten = any(name == "the status is lost" for name, _, _ in story)
                assert forgotten, "only the status, and nodes that are gone, could tell whose it was"
            there = [cloud_id for _, cloud_id in world.cloud.resources if cloud_id == "team-v5e"]
            if there:
                delete_by_hand(world, *there)
            world.annotate(None)
            await rest(world)
        if has_ended(world):
            assert spec["recreate_policy"], "nothing keeps it from being made anew"
            assert await world.record_writes(rounds=2) == []
            world.edit(recreatePolicy={})
            await rest(world)
        assert world.status.state is QueuedResourceState.ACTIVE
        assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
        assert world.condition("Accepted") == ("True", "Accepted")
        assert world.status.error is None
        assert await world.record_writes(rounds=2) == []
        world.restart_operator()
        assert await world.record_writes(rounds=2) == [], "a new operator decides as the old one would have"

    asyncio.run(run())


@settings(max_examples=scaled(40), deadline=None, suppress_health_check=slow)
@given(spec=specs(), story=stories, later=stories, adopted=st.booleans())
@example(spec={}, story=[("a deletion fails", 0, 2), ("the status is lost", 0, 0)], later=[], adopted=False)
@example(
    spec={},
    story=[("a deletion fails", 0, 2), ("a list fails", 3, 0), ("the status is lost", 0, 0)],
    later=[("a creation fails", 0, 1)],
    adopted=False,
)
def test_a_deletion_always_ends_and_leaves_what_it_should(
    spec: dict[str, Any], story: Story, later: Story, *, adopted: bool
) -> None:
    async def run() -> None:
        world = StoryWorld(**spec)
        await world.settle_in(adopted=adopted)
        await play(world, story)
        world.delete()
        unwanted = {"the status is lost", "the spec is changed"}
        await play(world, [step for step in later if step[0] not in unwanted])
        await rest(world)
        assert world.raw is None
        if spec.get("deletion_policy") == "Retain":
            nodes = world.cluster.list_objects("nodes")
            assert not [raw for raw in nodes if raw["spec"].get("unschedulable")], "nodes take pods again"
        else:
            assert not world.names_in_cloud()
            # What was adopted is the object's by its status alone.
            forgotten = adopted and any(name == "the status is lost" for name, _, _ in story)
            assert forgotten or not world.lost_hosts, "no Node is left of a machine that is gone"

    asyncio.run(run())
