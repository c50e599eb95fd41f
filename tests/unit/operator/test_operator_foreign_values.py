"""Test that values from a pod can't make an unwritable status, or keep the operator from its work."""

import json
from pathlib import Path

import pytest

from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import Phase


async def running() -> World:
    world = World()
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


@pytest.mark.parametrize(
    "message",
    [
        '{"code":75,"step":-1}',
        '{"code":75,"committed":{"sequence":99999999999999999,"step":1},"root":"r"}',
        "[" * 4000,
    ],
)
async def test_last_words_that_are_out_of_bounds_are_another_programs(message: str) -> None:
    world = await running()
    world.controllers.end_pod(world.pods[0], 1, message=message)
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]
    assert world.status.attempts[0].to_step is None
    assert world.status.checkpoint is None


async def test_last_words_of_the_last_and_the_next_runtime_are_believed() -> None:
    recorded = sorted((Path(__file__).parents[2] / "data/wire").glob("*/termination.json"))
    for path in recorded:
        world = await running()
        raw = json.loads(path.read_bytes()) | {"host": {"uptime_s": 5}, "stacks": ["a"]}
        world.controllers.end_pod(world.pods[0], 1, message=json.dumps(raw))
        await world.run_until_settled()
        assert world.causes == ["Maintenance", None]
        assert world.status.checkpoint is not None
        assert world.status.checkpoint.latest is not None
        assert world.status.checkpoint.latest.step == raw["committed"]["step"]
    assert recorded


async def test_causes_that_nobody_knows_are_one_kind_of_disruption() -> None:
    world = await running()
    for cause in ("x" * 300, "MeteorStrike"):
        message = f'{{"code":75,"cause":"{cause}","notice":"sigterm"}}'
        world.controllers.end_pod(world.pods[0], 75, message=message)
        await world.run_until_settled(rounds=8)
    assert [(entry.cause, entry.count) for entry in world.status.restarts.by_cause] == [("Disruption", 2)]
