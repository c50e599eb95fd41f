"""Test which namespaces kopf watches."""

import asyncio
from typing import Any

import kopf
import pytest

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.kinds import list_watched_kinds
from stepkeeper_operator.cluster.resources import Resource
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.handlers.watch import make_kopf_settings, make_registry, run_watches
from stepkeeper_operator.readiness import find_readable
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.startup import Operator


async def test_a_namespace_that_can_not_be_read_is_left_out_and_taken_in_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = {"vision"}

    async def list_uids(resource: Resource, selector: str, *, namespace: str | None = None) -> frozenset[str]:
        if namespace in gone:
            raise ApiError(403, "forbidden")
        return frozenset()

    cluster = FakeCluster(lambda: 0.0)
    monkeypatch.setattr(cluster, "list_uids", list_uids)
    asked = ("ml", "vision")
    assert await find_readable(cluster, asked) == ("ml",)
    assert [vars(record)["namespace"] for record in caplog.records] == ["vision"]
    operator = Operator(OperatorSettings(watch_namespaces=asked, kueue_enabled=False), cluster)
    await operator._look_around()
    assert not await operator._look_around()
    gone.clear()
    assert await operator._look_around()


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
    registry = make_registry(Cache(), kinds, lambda key, delay_s: None, relisted=asyncio.Event())
    await run_watches(
        registry,
        make_kopf_settings(kinds),
        namespaces=namespaces,
        stop=asyncio.Event(),
        started=lambda: None,
    )
    assert (asked["clusterwide"], tuple(asked["namespaces"])) == (not namespaces, namespaces)
