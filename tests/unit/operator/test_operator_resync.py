"""Test the looks for objects that are gone: of what can't be listed ever less often. Tests move the loop's time."""

import asyncio
from collections import Counter

import pytest
from typing_extensions import override

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.kinds import list_watched_kinds
from stepkeeper_operator.cluster import JOBSETS, WORKLOADS, Resource
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.handlers.resync import Resync

PERIOD_S = 600
KINDS = list_watched_kinds(cloud_tpu=False, kueue=True)


class PartlyListable(FakeCluster):
    """A cluster that refuses to list one kind, and counts the lists."""

    def __init__(self, unlistable: Resource, status: int) -> None:
        super().__init__(lambda: 0.0)
        self.lists: Counter[str] = Counter()
        self._unlistable, self._status = unlistable, status

    @override
    async def list_uids(
        self, resource: Resource, label_selector: str, *, namespace: str | None = None
    ) -> frozenset[str]:
        self.lists[resource.plural] += 1
        if resource is self._unlistable:
            raise ApiError(self._status, "this can't be listed")
        return await super().list_uids(resource, label_selector, namespace=namespace)


async def relist_once(cluster: FakeCluster, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a watch list its kind, and a period less a second go by."""
    now = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    relisted = asyncio.Event()
    relisted.set()

    async def never() -> bool:
        return False

    resync = Resync(
        cluster=cluster,
        cache=cache,
        kinds=KINDS,
        enqueue=lambda _key, _delay_s: None,
        relisted=relisted,
        period_s=PERIOD_S,
    )
    task = asyncio.create_task(resync.run((), until=never))
    for _ in range(PERIOD_S - 1):
        for _ in range(8):
            await asyncio.sleep(0)
        now += 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("kind", "status"), [(JOBSETS, 404), (WORKLOADS, 403)], ids=str)
async def test_what_can_not_be_listed_is_tried_ever_less_often_and_alone(
    kind: Resource, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = PartlyListable(kind, status)
    await relist_once(cluster, Cache(), monkeypatch)
    assert 5 <= cluster.lists.pop(kind.plural) <= 10
    assert set(cluster.lists.values()) == {1}


async def test_workloads_are_gone_with_kueue(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, cache = PartlyListable(WORKLOADS, 404), Cache()
    owner = {
        "kind": "JobSet",
        "name": "lm",
        "uid": "js",
        "controller": True,
        "apiVersion": JOBSETS.api_version,
    }
    meta = {"name": "w", "namespace": "default", "uid": "w", "ownerReferences": [owner]}
    cache.record(WORKLOADS, {"metadata": meta, "spec": {}, "status": {}}, deleted=False)
    assert cache.list_uids(WORKLOADS) == {"w"}
    await relist_once(cluster, cache, monkeypatch)
    assert cache.list_uids(WORKLOADS) == frozenset()
    assert cluster.lists[WORKLOADS.plural] == 1
