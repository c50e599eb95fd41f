"""What happens to jobs in a world, and what their status then says."""

from collections.abc import Mapping
from typing import Any

import pytest

from fake_cluster.kubelets import termination_message
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import Condition, Phase

__all__ = ["condition_of", "count_restarts", "disrupt", "end_pods", "fail", "message_of", "run_job", "table"]


async def run_job(*, spot: bool = False, **spec: Any) -> World:
    """Make a world in which the pods of its job run. `spec` overrides or adds fields of the spec."""
    world = World(spot=spot, **spec)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


def fail(world: World, code: int = 1, *, index: int = 0, said: int | None = None, error: str = "") -> None:
    """End a pod with that code. Its training may have said another one, and an error."""
    message = termination_message(said or code, error=error) if said or error else ""
    world.controllers.end_pod(world.pods[index], code, message=message)


def end_pods(world: World, code: int, **last_word: object) -> None:
    """End all pods with that code, after these last words of their trainings if any are given."""
    message = termination_message(code, **last_word) if last_word else ""
    for pod in world.pods:
        world.controllers.end_pod(pod, code, message=message)


def disrupt(world: World, reason: str = "EvictionByEvictionAPI") -> None:
    """Disrupt the first pod, which dies of the signal."""
    world.controllers.disrupt(world.pods[0], reason)
    world.controllers.end_pod(world.pods[0], 143)


def condition_of(world: World, kind: str) -> Condition:
    """Return a condition of the job."""
    return next(condition for condition in world.status.conditions if condition.type == kind)


def message_of(world: World, kind: str) -> str:
    """Return the message of a condition of the job."""
    return condition_of(world, kind).message


def count_restarts(world: World) -> dict[str, tuple[int, int]]:
    """Return how many restarts each cause had, and how many of these count towards a limit."""
    return {each.cause: (each.count, each.counted_towards_limit) for each in world.status.restarts.by_cause}


def table(names: str, rows: Mapping[str, tuple[object, ...]]) -> pytest.MarkDecorator:
    """Parametrize a test by rows, each under what it is about."""
    return pytest.mark.parametrize([name.strip() for name in names.split(",")], rows.values(), ids=rows)
