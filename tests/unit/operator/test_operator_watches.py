"""Test which namespaces kopf watches."""

import asyncio
from typing import Any

import kopf
import pytest

from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.kinds import list_watched_kinds
from stepkeeper_operator.handlers.watch import make_kopf_settings, make_registry, run_watches


@pytest.mark.parametrize("namespaces", [(), ("ml", "vision")])
async def test_listed_namespaces_are_watched_or_all_are(
    namespaces: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    async def spawn(**options: Any) -> list[asyncio.Task[None]]:
        asked.update(options)
        return []

    monkeypatch.setattr(kopf, "spawn_tasks", spawn)
    kinds = list_watched_kinds(cloud_tpu=True)
    registry = make_registry(
        Cache(), kinds, lambda key, delay_s: None, synced=asyncio.Event(), relisted=asyncio.Event()
    )
    await run_watches(
        registry,
        make_kopf_settings(kinds),
        namespaces=namespaces,
        stop=asyncio.Event(),
        started=lambda: None,
    )
    assert (asked["clusterwide"], tuple(asked["namespaces"])) == (not namespaces, namespaces)
