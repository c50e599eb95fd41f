"""Test that a kind that is listed again makes the operator look for objects deleted meanwhile."""

import asyncio
from typing import Any

import pytest

from stepkeeper_operator.cache.keys import ObjectKey, job_key
from stepkeeper_operator.cache.kinds import list_watched_kinds
from stepkeeper_operator.handlers.watch import make_registry
from stepkeeper_operator.testing import World


@pytest.mark.parametrize(("kind", "relists"), [(None, True), ("MODIFIED", False), ("ADDED", False)])
async def test_a_listed_object_says_that_its_kind_was_listed(kind: str | None, *, relists: bool) -> None:
    world = World()
    await world.run_until_settled(rounds=2)
    synced, relisted = asyncio.Event(), asyncio.Event()
    keys: list[ObjectKey] = []
    registry = make_registry(
        world.cache,
        list_watched_kinds(cloud_tpu=False),
        lambda key, _delay_s: keys.append(key),
        synced=synced,
        relisted=relisted,
    )
    event: Any = {"type": kind, "object": world.jobset}
    (handler,) = (h for h in registry._watching.get_all_handlers() if h.id == "watch-jobsets")
    await handler.fn(event=event)
    assert keys == [job_key("default", "lm")]
    assert synced.is_set()
    assert relisted.is_set() is relists
