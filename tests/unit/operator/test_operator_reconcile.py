"""Test the loop that all kinds share, the startup that plugs the kinds in, and the looks for objects that are gone."""

import asyncio
import logging
import re
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from typing_extensions import override

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey, job_key, queued_resource_key
from stepkeeper_operator.cache.kinds import list_watched_kinds
from stepkeeper_operator.cluster.resources import JOBSETS, QUEUED_RESOURCES, WORKLOADS, Resource
from stepkeeper_operator.errors import AlreadyExistsError, ApiError, ConflictError
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.handlers.resync import Resync
from stepkeeper_operator.handlers.watch import make_kopf_settings, make_registry
from stepkeeper_operator.kinds.controller import RETRY_SOON_S, KindController
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.metrics import Metrics
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.startup import Operator

QR = queued_resource_key("default", "slice")
JOB = job_key("default", "lm")
RAW: dict[str, Any] = {"metadata": {"name": "slice", "namespace": "default", "uid": "qr-1"}}


class Recorder(KindController[RawObject, None, None]):
    """A controller whose steps keep their calls; the last one returns a prepared answer."""

    def __init__(self, answer: float | Exception | None = None) -> None:
        self.answer = answer
        self.cache = Cache()
        self.cache.record_queued_resource(RAW)
        self.metrics = Metrics()
        self.applied: list[ObjectKey] = []
        self.forgotten: list[str] = []
        shared = Shared(
            cluster=FakeCluster(lambda: 0.0),
            cache=self.cache,
            metrics=self.metrics,
            identity="operator-1",
            acting=lambda: True,
        )
        super().__init__(QUEUED_RESOURCES, shared)

    def results(self) -> dict[str, str]:
        """Return how many reconciles had each result."""
        found = r'stepkeeper_reconciles_total\{kind="QueuedResource",result="(\w+)"\} (\S+)'
        return dict(re.findall(found, self.metrics.render().decode()))

    @override
    def _read(self, key: ObjectKey, raw: RawObject) -> tuple[RawObject | None, tuple[str, ...]]:
        return raw, ()

    @override
    async def _manage_unreadable(self, key: ObjectKey, raw: RawObject, problems: tuple[str, ...]) -> None:
        raise NotImplementedError

    @override
    async def _observe(self, key: ObjectKey, subject: RawObject, problems: tuple[str, ...]) -> None: ...

    @override
    def _decide(self, subject: RawObject, observed: None, *, now: float) -> None: ...

    @override
    async def _apply(
        self, key: ObjectKey, subject: RawObject, observed: None, decision: None
    ) -> float | None:
        self.applied.append(key)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @override
    def _forget_object(self, key: ObjectKey, uid: str) -> None:
        self.forgotten.append(uid)


@pytest.mark.parametrize("error", [ConflictError(409, "changed"), AlreadyExistsError(409, "exists")])
async def test_a_reconcile_that_was_behind_is_done_again_soon(error: ApiError) -> None:
    controller = Recorder(error)
    assert await controller.reconcile(QR) == RETRY_SOON_S
    assert controller.results() == {"behind": "1.0"}


@pytest.mark.parametrize(
    ("error", "traceback"), [(ApiError(500, "down"), False), (ZeroDivisionError("a bug"), True)]
)
async def test_an_error_is_told_with_kind_and_name_and_tried_again(
    error: Exception, *, traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    controller = Recorder(error)
    with pytest.raises(type(error)):
        await controller.reconcile(QR)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    told = {"kind": "QueuedResource", "object": "default/slice", "error": str(error)}
    assert vars(record).items() >= told.items()
    assert bool(record.exc_info) is traceback
    assert controller.results() == {"error": "1.0"}


async def test_the_operator_waits_for_the_crds_of_the_kinds_that_it_watches() -> None:
    cluster = PartlyListable(JOBSETS, 404)
    operator = Operator(OperatorSettings(cloud_tpu_enabled=True), cluster)
    waiting = asyncio.create_task(operator._readiness._wait_for_crds())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    operator = Operator(OperatorSettings(), FakeCluster(lambda: 0.0))
    await operator._readiness._wait_for_crds()


async def test_an_object_is_reconciled_until_it_is_gone_and_then_forgotten() -> None:
    controller = Recorder(7.0)
    assert await controller.reconcile(QR) == 7.0
    assert (controller.applied, controller.forgotten) == ([QR], [])
    assert controller.results() == {"done": "1.0"}
    rendered = controller.metrics.render().decode()
    assert 'stepkeeper_reconcile_seconds_count{kind="QueuedResource"} 1.0' in rendered
    controller.cache.record_queued_resource(RAW, deleted=True)
    assert await controller.reconcile(QR) is None
    assert (controller.applied, controller.forgotten) == ([QR], ["qr-1"])
    assert controller.results() == {"done": "1.0"}


@pytest.mark.parametrize("enabled", [False, True])
async def test_queued_resources_are_watched_and_swept_only_where_they_are_on(*, enabled: bool) -> None:
    operator = Operator(OperatorSettings(cloud_tpu_enabled=enabled), FakeCluster(lambda: 0.0))
    registry = make_registry(
        operator._cache,
        operator._kinds,
        operator._queues.add,
        relisted=operator._relisted,
    )
    handlers = {handler.id: handler for handler in registry._watching.get_all_handlers()}
    assert ("watch-queuedresources" in handlers) is enabled
    if enabled:
        await handlers["watch-queuedresources"].fn(event={"type": "ADDED", "object": RAW})
        assert operator._queues.count_due() == {JOB.kind: 0, QR.kind: 1}
    selectors = make_kopf_settings(operator._kinds).watching.label_selectors
    assert {selector.any_name for selector in selectors} == {"jobsets", "jobs", "pods"}
    other = queued_resource_key("default", "other")
    operator._cache.record_queued_resource(
        RAW | {"metadata": RAW["metadata"] | {"name": other.name, "uid": "o"}}
    )
    assert not await operator._make_resync().sweep()
    assert operator._queues.count_due() == {JOB.kind: 0, **({QR.kind: 2} if enabled else {})}


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
    owner = {"kind": "JobSet", "name": "lm", "uid": "js", "controller": True}
    meta = {"name": "w", "namespace": "default", "uid": "w", "ownerReferences": [owner]}
    cache.record(WORKLOADS, {"metadata": meta, "spec": {}, "status": {}}, deleted=False)
    assert cache.list_uids(WORKLOADS) == {"w"}
    await relist_once(cluster, cache, monkeypatch)
    assert cache.list_uids(WORKLOADS) == frozenset()
    assert cluster.lists[WORKLOADS.plural] == 1


async def test_the_length_of_the_queue_is_shown_by_kind() -> None:
    operator = Operator(OperatorSettings(cloud_tpu_enabled=True), FakeCluster(lambda: 0.0))
    for key in (JOB, QR, queued_resource_key("default", "other"), QR):
        operator._queues.add(key)
    request = make_mocked_request("GET", "/metrics")
    answer = await (await operator._make_health_app().router.resolve(request)).handler(request)
    assert isinstance(answer, web.Response)
    assert 'stepkeeper_queue_length{kind="QueuedResource"} 2.0' in (answer.text or "").splitlines()
