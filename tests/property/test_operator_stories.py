"""Test that random stories of a job end well: what can run runs, its attempt is open, and its costs are its own."""

import asyncio
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_stories.happenings import HAPPENINGS
from operator_stories.properties import (
    PROPERTIES,
    check_next_failure,
    check_next_report,
    check_standstill,
    find_contradiction,
)
from operator_stories.story import come_to_rest, tell
from thoroughness import scaled

from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import Phase

pytestmark = pytest.mark.timeout(600)
_STORIES = 50
_SHORT, _LONG = 100, int(os.environ.get("STEPKEEPER_STORIES", "5000"))


async def find_faults(seed: int, names: list[str] = []) -> list[str]:  # noqa: B006  # nobody changes it
    """Tell the story of the seed, and find what is wrong with its end."""
    teller = await tell(seed, HAPPENINGS, find_contradiction, names)
    world = teller.world
    try:
        await come_to_rest(teller, find_contradiction)
        faults = teller.faults + [
            f"{check.__name__}: {fault}" for check in PROPERTIES if (fault := check(teller)) is not None
        ]
        if writes := await world.record_writes(rounds=3):
            faults.append(f"it writes at rest: {writes}")
        world.restart_operator()
        if writes := await world.record_writes(rounds=2):
            faults.append(f"a new operator decides other than the old one: {writes}")
        if not faults and world.phase() is Phase.RUNNING:
            found = [
                await check(teller) for check in (check_next_report, check_standstill, check_next_failure)
            ]
            faults = [fault for fault in found if fault is not None]
    except AssertionError as error:
        faults = [str(error)]
    return [f"story {seed} ({', '.join(teller.told)}): {fault}; {world.causes}" for fault in faults]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(seed, marks=[] if seed < _SHORT else pytest.mark.long)
        for seed in range(0, _LONG, _STORIES)
    ],
)
async def test_every_story_ends_well(first: int) -> None:
    faults = [fault for seed in range(first, first + _STORIES) for fault in await find_faults(seed)]
    assert not faults, "\n".join(faults)


async def test_what_is_fenced_beside_a_lost_node_ends_well() -> None:
    story = ["a node is lost", "a trainer is fenced"]
    faults = [fault for seed in range(10) for fault in await find_faults(seed, story)]
    assert not faults, "\n".join(faults)


@settings(max_examples=scaled(40))
@given(max_failures=st.integers(0, 5), gaps=st.lists(st.integers(1, 30), min_size=7, max_size=7))
def test_a_job_that_only_fails_is_restarted_exactly_as_often_as_allowed(
    max_failures: int, gaps: list[int]
) -> None:
    async def run() -> None:
        restarts: dict[str, Any] = {
            "maxFailures": max_failures,
            "backoff": {"initialSeconds": 1, "maxSeconds": 5},
        }
        world = World(restarts=restarts)
        for gap in gaps:
            await world.run_until_settled(rounds=5 + gap)
            if pods := [pod for pod in world.pods if pod["status"]["phase"] == "Running"]:
                world.controllers.end_pod(pods[0], 1)
        await world.run_until_settled(rounds=10)
        assert world.status.phase is Phase.FAILED
        assert world.status.restarts.total == max_failures

    asyncio.run(run())
