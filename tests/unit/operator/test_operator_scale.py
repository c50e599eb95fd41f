"""Test what keeps the cost of one job the same beside thousands of others."""

import asyncio
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fake_cluster.cluster import FakeCluster
from fake_cluster.kubelets import training_report
from stepkeeper.contract import Report, ReportPhase
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.kinds import list_watched_kinds
from stepkeeper_operator.cache.reports import LastReport, ReportCache, TrainerStatus
from stepkeeper_operator.cache.roots import Roots
from stepkeeper_operator.cluster.resources import NODES
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts.checkpoint_root import CheckpointRoot, JobRoot
from stepkeeper_operator.handlers import resync
from stepkeeper_operator.handlers.resync import wait_until_listed

PLACES = [place for n in range(1, 4) for place in product("ab", repeat=n)]


def root(place: CheckpointRoot) -> JobRoot:
    name = "".join(place)
    return JobRoot(
        uri=name,
        place=place,
        namespace="default",
        name=name,
        uid=name,
        created_at=0.0,
        started=False,
        inactive=False,
    )


def overlap(one: CheckpointRoot, other: CheckpointRoot) -> bool:
    depth = min(len(one), len(other))
    return one[:depth] == other[:depth]


def test_rivals_are_those_in_the_same_root_inside_it_or_around_it() -> None:
    roots = Roots()
    for place in PLACES:
        roots.set_root("".join(place), root(place))
    left = [place for place in PLACES if place[-1] == "a"]
    for place in PLACES:
        roots.set_root("".join(place), root(place) if place in left else None)
    roots.set_root("twin", replace(root(left[0]), name="twin", uid="twin"))
    for place in PLACES:
        wanted = {"".join(each) for each in left if each != place and overlap(each, place)}
        wanted |= {"twin"} if overlap(left[0], place) else set()
        assert {rival.uid for rival in roots.list_rivals("".join(place))} == (
            wanted if place in left else set()
        )


def node(uid: str, ready: str) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {"metadata": {"name": uid, "uid": uid}, "spec": {}, "status": {"conditions": [condition]}}


def test_silent_nodes_are_counted_until_they_report_again_or_are_gone() -> None:
    cache = Cache(lambda: 0.0)
    counts = []
    for raw, deleted in (
        (node("a", "True"), False),
        (node("b", "Unknown"), False),
        (node("a", "Unknown"), False),
        (node("a", "True"), False),
        (node("b", "Unknown"), True),
    ):
        cache.record(NODES, raw, deleted=deleted)
        counts.append(cache.count_nodes())
    assert counts == [(1, 0), (2, 1), (2, 2), (2, 1), (1, 0)]


async def test_jobs_are_reconciled_once_all_that_exists_is_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resync, "_LISTING_S", 0)
    monkeypatch.setattr(resync, "_RELIST_BURST_S", 0)
    cluster, cache = FakeCluster(lambda: 0.0), Cache()
    raws = [cluster.put("nodes", node(uid, "True")) for uid in ("a", "b", "c")]
    listed, failures = cluster.list_uids, [ApiError(500, "it restarts")]

    async def list_uids(*place: Any, **options: Any) -> frozenset[str]:
        if failures:
            raise failures.pop()
        return await listed(*place, **options)

    monkeypatch.setattr(cluster, "list_uids", list_uids)
    waiting = asyncio.create_task(wait_until_listed(cluster, cache, list_watched_kinds(cloud_tpu=False)))

    async def is_done() -> bool:
        for _ in range(20):
            await asyncio.sleep(0)
        return waiting.done()

    cache.record(NODES, raws[0])
    assert not await is_done()
    cache.record(NODES, raws[1])
    assert not await is_done()
    cluster.remove("nodes", None, "c")  # before the watch has listed it
    assert await is_done()
    await waiting


async def test_namespaces_that_are_not_watched_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, asked = FakeCluster(lambda: 0.0), set[str | None]()

    async def list_uids(resource: Any, *_: Any, namespace: str | None = None) -> frozenset[str]:
        if resource.cluster_wide:
            return frozenset()
        asked.add(namespace)
        if namespace == "refused":
            raise ApiError(403, "no")
        return frozenset() if namespace == "watched" else frozenset({"elsewhere"})

    monkeypatch.setattr(cluster, "list_uids", list_uids)
    kinds = list_watched_kinds(cloud_tpu=False)
    async with asyncio.timeout(60):
        await wait_until_listed(cluster, Cache(), kinds, ["watched", "refused"])
    assert asked == {"watched", "refused"}


async def test_a_kind_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, asked = FakeCluster(lambda: 0.0), list[str]()

    async def list_uids(resource: Any, *_: Any, **__: Any) -> frozenset[str]:
        asked.append(resource.kind)
        if resource.kind == "Workload":
            raise ApiError(404, "no such kind")
        return frozenset()

    monkeypatch.setattr(cluster, "list_uids", list_uids)
    async with asyncio.timeout(60):
        await wait_until_listed(cluster, Cache(), list_watched_kinds(cloud_tpu=False, kueue=True))
    assert asked.count("Workload") == 1


LAST = LastReport(report=training_report(3, 30), ordinal=(0, 0), received_at=100.0, pod_uid="p")


@pytest.mark.parametrize(
    ("report", "others", "is_due"),
    [
        pytest.param({"step": 31, "step_millis": 7, "metrics": {"loss": "1"}}, {}, False, id="a step"),
        pytest.param({}, {}, False, id="the same"),
        pytest.param({"in_flight_step": 31}, {}, False, id="a save begins"),
        pytest.param({"step": 29}, {}, True, id="a step back"),
        pytest.param({"phase": ReportPhase.DONE}, {}, True, id="a phase"),
        pytest.param({"notice": "sigterm"}, {}, True, id="a notice"),
        pytest.param({"commits": training_report(4, 40).commits}, {}, True, id="a commit"),
        pytest.param({}, {"received_at": 114.0}, False, id="late"),
        pytest.param({}, {"received_at": 115.0}, True, id="after a silence"),
        pytest.param({}, {"pod_uid": "q"}, True, id="another pod"),
        pytest.param({}, {"ordinal": (0, 1)}, True, id="another attempt"),
    ],
)
def test_a_report_is_due_at_once_unless_only_the_progress_differs(
    report: dict[str, Any], others: dict[str, Any], *, is_due: bool
) -> None:
    reports = ReportCache(report_interval_s=10, silence_s=15, progress_interval_s=60)
    assert reports.add_report("job", LAST)
    later = replace(LAST, report=replace(LAST.report, **report), received_at=110.0)
    assert reports.add_report("job", replace(later, **others)) is is_due


def test_the_first_step_is_due() -> None:
    reports = ReportCache(report_interval_s=10, silence_s=15, progress_interval_s=60)
    reports.add_report("job", replace(LAST, report=Report(phase=ReportPhase.TRAINING)))
    assert reports.add_report("job", replace(LAST, report=Report(phase=ReportPhase.TRAINING, step=1)))
    due = []
    for time in range(10, 200, 10):
        report = Report(phase=ReportPhase.TRAINING, step=1 + time)
        if reports.add_report("job", replace(LAST, report=report, received_at=100.0 + time)):
            due.append(time)
    assert due == [60, 120, 180]
    reports.forget_job("job")
    assert reports.add_report("job", LAST)


def test_what_trainers_post_themselves_is_due_as_seldom_as_progress() -> None:
    """transformers posts every 5 s."""
    now = 0.0
    reports = ReportCache(report_interval_s=10, progress_interval_s=60, clock=lambda: now)
    due = []
    for time in range(0, 135, 5):
        now = float(time)
        status = TrainerStatus(ordinal=(0, int(time >= 70)), percent=time // 5)
        if reports.set_trainer_status("job", status):
            due.append(time)
        assert reports.get_trainer_status("job") == status
    assert due == [0, 60, 70, 130]
    reports.forget_job("job")
    assert reports.set_trainer_status("job", status)
