"""Test condition GraceSufficient: whether a save fits into the time that pods have at their end."""

from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.job_machines import change, machines, world_of
from fake_cluster.kubelets import training_report
from fake_cluster.stories import play
from fake_cluster.world import World
from stepkeeper.contract import Report

GRACE = "GraceSufficient"
FITS, TOO_SHORT = f"condition {GRACE} True/SaveFits", f"condition {GRACE} False/GraceTooShort"
TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "trainer", "image": "t"}]}}
GKE_SPOT = {"tpu": {"accelerator": "v5e", "topology": "2x4", "chipsPerHost": 4, "provisioning": "Spot"}}


def report_of(*durations_s: float) -> Report:
    """Make the report of a training whose commits took so long."""
    commit, last = training_report(1, 10).commits[0], len(durations_s)
    commits = tuple(
        replace(commit, sequence=number, step=10 * number, duration_millis=int(1000 * duration_s))
        for number, duration_s in enumerate(durations_s, start=1)
    )
    return training_report(last, 10 * last, commits=commits)


def with_grace(grace_s: int) -> dict[str, Any]:
    return {"spec": TEMPLATE["spec"] | {"terminationGracePeriodSeconds": grace_s}}


async def saved(world: World, *durations_s: float) -> World:
    """Let the job run and report saves that took so long."""
    await world.run_until_settled(rounds=4)
    if durations_s:
        world.receive_report(report_of(*durations_s))
    await world.run_until_settled(rounds=2)
    return world


ON, OFF, SPOT = machines(read_back="On"), machines(read_back="Off"), machines(tier={"spot": {}})


@pytest.mark.parametrize(
    ("resource", "spec", "duration_s", "found", "words"),
    [
        (None, {}, 28.4, FITS, "takes 29 s, and pods have 30 s"),
        (None, {}, 28.6, TOO_SHORT, "set it to at least 31"),
        (None, {"template": with_grace(120)}, 100, FITS, "pods have 120 s"),
        (None, {"template": with_grace(0)}, 1, TOO_SHORT, "to at least 3"),
        (None, {"placement": GKE_SPOT}, 13, FITS, "pods have 15 s"),
        (None, {"placement": GKE_SPOT}, 14, TOO_SHORT, "at most 13 s"),
        (None, {"placement": GKE_SPOT, "template": with_grace(600)}, 20, TOO_SHORT, "15 s regardless"),
        (None, {"placement": GKE_SPOT, "template": with_grace(5)}, 4, TOO_SHORT, "to at least 6"),
        (ON, {}, 200, FITS, "pods have 300 s"),
        (ON, {}, 300, TOO_SHORT, "at most 298 s"),
        (ON, {"template": with_grace(60)}, 100, TOO_SHORT, "to at least 102"),
        (ON, {"template": with_grace(900)}, 400, TOO_SHORT, "waits 300 s"),
        (OFF, {}, 40, TOO_SHORT, "to at least 42"),
        (SPOT, {"template": with_grace(60)}, 20, TOO_SHORT, "15 s regardless"),
    ],
)
async def test_the_time_of_a_save_is_compared_with_the_time_that_pods_have(
    resource: dict[str, Any] | None, spec: dict[str, Any], duration_s: float, found: str, words: str
) -> None:
    world = World(**spec) if resource is None else world_of(resource, **spec)
    await play(await saved(world, duration_s), f"{found}, rests")
    assert words in world.message(GRACE)


async def test_nothing_is_known_before_the_first_commit() -> None:
    await play(World(), f"run 6, condition {GRACE} Unknown/NoCommitYet, message {GRACE} pods have 30 s")


async def test_a_job_that_saves_nothing_at_its_end_needs_no_time() -> None:
    checkpoint = {"uri": "gs://b/x", "interval": {"every": {"steps": 1}}, "onDisruption": "Skip"}
    await play(await saved(World(checkpoint=checkpoint), 100), f"condition {GRACE} True/NothingToSave")


async def test_the_longest_of_the_newest_saves_counts() -> None:
    world = await play(await saved(World(), 50, 3), TOO_SHORT)
    world.receive_report(report_of(50, *(3 for _ in range(10))))
    await play(world, f"run 2, {FITS}")


async def test_a_change_is_told_once_and_what_was_known_outlives_a_stop_and_an_operator() -> None:
    world = await play(
        await saved(World(), 100), f"events GraceTooShort 1, restart, suspend, run, {TOO_SHORT}"
    )
    world.edit(suspend=False, template=with_grace(200))
    await play(world, f"run, {FITS}, events GraceTooShort 1, events SaveFits 1")


async def test_pods_that_run_have_what_they_were_started_with() -> None:
    world = await play(await saved(world_of(machines(read_back="Off")), 100), TOO_SHORT)
    await change(world, read_back="On")
    assert "pods have 30 s" in world.message(GRACE)
