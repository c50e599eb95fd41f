"""Test what becomes of conditions that others or an earlier operator wrote, or that nobody can judge any more."""

from typing import Any

import pytest

from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.errors import ApiError

MOST = 16
QUOTA = ApiError(403, 'jobsets "lm" is forbidden: exceeded quota: objects')


def job_of(world: World) -> dict[str, Any]:
    return world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]


def add_foreign(world: World, n_conditions: int) -> None:
    """Let another controller write conditions of its own into the job's status."""
    raw = job_of(world)
    status = raw.get("status") or {}
    foreign = [
        {
            "type": f"example.com/{index:02}",
            "status": "True",
            "reason": "Theirs",
            "message": "",
            "lastTransitionTime": "2027-01-01T00:00:00Z",
        }
        for index in range(n_conditions)
    ]
    own = status.get("conditions") or []
    world.cluster.put("checkpointedtrainingjobs", raw | {"status": status | {"conditions": [*own, *foreign]}})


@pytest.mark.parametrize("n_foreign", [MOST, MOST + 4])
async def test_conditions_of_others_leave_room_for_the_jobs_own(n_foreign: int) -> None:
    world = World()
    add_foreign(world, n_foreign)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    kinds = [c["type"] for c in job_of(world)["status"]["conditions"]]
    assert len(kinds) == MOST
    assert {"Accepted", "Running", "Suspended"} < set(kinds)
    assert any(kind.startswith("example.com/") for kind in kinds)
    assert await world.record_writes(rounds=3) == []


async def test_an_unreadable_job_says_so_though_others_have_filled_its_conditions() -> None:
    world = World()
    add_foreign(world, MOST)
    raw = job_of(world)
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": raw["spec"] | {"placement": "here"}})
    await world.run_until_settled()
    conditions = job_of(world)["status"]["conditions"]
    assert len(conditions) == MOST
    assert conditions[0]["reason"] == "UnreadableSpec"


async def test_a_refusal_stands_over_a_restart_of_the_operator_until_it_has_tried_itself() -> None:
    world = World()
    world.cluster.refusals["create", "jobsets"] = QUOTA
    await world.run_until_settled()
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "QuotaExceeded")
    for _ in range(3):
        world.restart_operator()
        await world.run_until_settled(rounds=4)
        assert world.condition("Accepted") == (ConditionStatus.FALSE, "QuotaExceeded")
    assert world.events.count("QuotaExceeded") == 1
    world.restart_operator()
    world.cluster.refusals.clear()
    await world.run_until_settled()
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")
    assert world.phase() is Phase.RUNNING


async def test_a_refusal_of_what_was_edited_meanwhile_does_not_stand() -> None:
    world = World()
    world.cluster.refusals["create", "jobsets"] = QUOTA
    await world.run_until_settled()
    world.stop_operator()
    world.cluster.refusals.clear()
    world.edit(suspend=True)
    world.restart_operator()
    await world.reconcile()
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


async def test_nobody_judges_a_job_that_can_not_be_read() -> None:
    world = World()
    await world.run_until_settled()
    assert world.condition("Running") == (ConditionStatus.TRUE, "AllPodsRun")
    raw = job_of(world)
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": raw["spec"] | {"placement": "here"}})
    await world.run_until_settled()
    for kind in ("Running", "Reporting", "Progressing"):
        assert world.condition(kind) == (ConditionStatus.UNKNOWN, "UnreadableSpec")
    assert b"stepkeeper_stalled{" not in world.metrics.render()
    assert await world.record_writes(rounds=3) == []
    world.edit(placement=raw["spec"]["placement"])
    await world.run_until_settled()
    assert world.condition("Running") == (ConditionStatus.TRUE, "AllPodsRun")
