"""Test condition GraceSufficient: whether a save fits into the time that pods have at their end."""

from typing import Any

import pytest

from fake_cluster.job_machines import change, machines, world_of
from fake_cluster.stories import message_of
from fake_cluster.world import World
from stepkeeper.contract import Head, Report, ReportedCommit, ReportPhase
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus

GRACE = "GraceSufficient"
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "trainer", "image": "t"}]}}
GKE_SPOT = {"tpu": {"accelerator": "v5e", "topology": "2x4", "chipsPerHost": 4, "provisioning": "Spot"}}


def report_of(*durations_s: float) -> Report:
    """Make the report of a training whose commits took so long."""
    commits = tuple(
        ReportedCommit(
            sequence=number,
            step=10 * number,
            uri=f"gs://bucket/runs/lm/{number}",
            size_bytes=1,
            duration_millis=int(1000 * duration_s),
            time_unix_s=1,
        )
        for number, duration_s in enumerate(durations_s, start=1)
    )
    last = commits[-1]
    head = Head(sequence=last.sequence, step=last.step, uri=last.uri, size_bytes=1)
    return Report(
        phase=ReportPhase.TRAINING, root="r", tail=last.sequence, head=head, step=last.step, commits=commits
    )


def with_grace(grace_s: int) -> dict[str, Any]:
    return {"spec": TEMPLATE["spec"] | {"terminationGracePeriodSeconds": grace_s}}


async def saved(world: World, *durations_s: float) -> World:
    """Let the job run and report saves that took so long."""
    await world.run_until_settled(rounds=4)
    if durations_s:
        world.receive_report(report_of(*durations_s))
    await world.run_until_settled(rounds=2)
    return world


@pytest.mark.parametrize(
    ("spec", "duration_s", "status", "words"),
    [
        ({}, 28.4, TRUE, "takes 29 s, and pods have 30 s"),
        ({}, 28.6, FALSE, "set it to at least 31"),
        ({"template": with_grace(120)}, 100, TRUE, "pods have 120 s"),
        ({"template": with_grace(0)}, 1, FALSE, "to at least 3"),
        ({"placement": GKE_SPOT}, 13, TRUE, "pods have 15 s"),
        ({"placement": GKE_SPOT}, 14, FALSE, "at most 13 s"),
        ({"placement": GKE_SPOT, "template": with_grace(600)}, 20, FALSE, "15 s whatever"),
        ({"placement": GKE_SPOT, "template": with_grace(5)}, 4, FALSE, "to at least 6"),
    ],
)
async def test_the_time_of_a_save_is_compared_with_the_time_that_pods_have(
    spec: dict[str, Any], duration_s: float, status: ConditionStatus, words: str
) -> None:
    world = await saved(World(**spec), duration_s)
    assert world.condition(GRACE) == (status, "SaveFits" if status is TRUE else "GraceTooShort")
    assert words in message_of(world, GRACE)
    assert await world.record_writes(rounds=3) == []


@pytest.mark.parametrize(
    ("resource", "spec", "duration_s", "words"),
    [
        ({"read_back": "On"}, {}, 200, "pods have 300 s"),
        ({"read_back": "On"}, {}, 300, "at most 298 s"),
        ({"read_back": "On"}, {"template": with_grace(60)}, 100, "to at least 102"),
        ({"read_back": "On"}, {"template": with_grace(900)}, 400, "waits 300 s"),
        ({"read_back": "Off"}, {}, 40, "to at least 42"),
        ({"tier": {"spot": {}}}, {"template": with_grace(60)}, 20, "15 s whatever"),
    ],
)
async def test_machines_of_a_queued_resource_have_their_own_limits(
    resource: dict[str, Any], spec: dict[str, Any], duration_s: float, words: str
) -> None:
    world = await saved(world_of(machines(**resource), **spec), duration_s)
    assert words in message_of(world, GRACE)
    assert (world.condition(GRACE) == (TRUE, "SaveFits")) is words.startswith("pods have")


async def test_nothing_is_known_before_the_first_commit() -> None:
    world = await saved(World())
    assert world.condition(GRACE) == (UNKNOWN, "NoCommitYet")
    assert "pods have 30 s" in message_of(world, GRACE)


async def test_a_job_that_saves_nothing_at_its_end_needs_no_time() -> None:
    checkpoint = {"uri": "gs://b/x", "interval": {"every": {"steps": 1}}, "onDisruption": "Skip"}
    world = await saved(World(checkpoint=checkpoint), 100)
    assert world.condition(GRACE) == (TRUE, "NothingToSave")


async def test_the_longest_of_the_newest_saves_counts() -> None:
    world = await saved(World(), 50, 3)
    assert world.condition(GRACE) == (FALSE, "GraceTooShort")
    world.receive_report(report_of(50, *(3 for _ in range(10))))
    await world.run_until_settled(rounds=2)
    assert world.condition(GRACE) == (TRUE, "SaveFits")


async def test_a_change_is_told_once_and_what_was_known_outlives_a_stop_and_an_operator() -> None:
    world = await saved(World(), 100)
    assert world.events.count("GraceTooShort") == 1
    world.restart_operator()
    world.edit(suspend=True)
    await world.run_until_settled()
    assert world.condition(GRACE) == (FALSE, "GraceTooShort")
    world.edit(suspend=False, template=with_grace(200))
    await world.run_until_settled()
    assert world.condition(GRACE) == (TRUE, "SaveFits")
    assert world.events.count("GraceTooShort") == 1
    assert world.events.count("SaveFits") == 1


async def test_pods_that_run_have_what_they_were_started_with() -> None:
    world = await saved(world_of(machines(read_back="Off")), 100)
    assert world.condition(GRACE) == (FALSE, "GraceTooShort")
    await change(world, read_back="On")
    assert "pods have 30 s" in message_of(world, GRACE)
