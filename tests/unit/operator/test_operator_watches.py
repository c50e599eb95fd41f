"""Test that every change that kopf delivers reaches the queue, in kopf's own order of handlers."""

import asyncio
from typing import Any, Literal

import kopf
import pytest
from kopf._cogs.aiokits.aiotoggles import ToggleSet
from kopf._cogs.structs.ephemera import AnyMemo, Memo
from kopf._cogs.structs.references import Resource as KopfResource
from kopf._core.engines.indexing import OperatorIndexers
from kopf._core.reactor.inventory import ResourceMemories
from kopf._core.reactor.processing import process_resource_event

from fake_cluster.world import World
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey, job_key
from stepkeeper_operator.cache.kinds import list_watched_kinds
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.handlers.watch import make_kopf_settings, make_registry

Kind = Literal["ADDED", "MODIFIED", "DELETED"]
JOB = job_key("default", "lm")
KINDS = list_watched_kinds(cloud_tpu=False)
RESOURCES = {kind.resource.plural: kind.resource for kind in KINDS}


class Watches:
    """kopf's part of an operator that has just started: it processes events by the shipped handlers."""

    def __init__(self, cache: Cache) -> None:
        self.keys: list[ObjectKey] = []
        self.synced, self.relisted = asyncio.Event(), asyncio.Event()
        self._registry = make_registry(
            cache,
            KINDS,
            lambda key, _delay_s: self.keys.append(key),
            synced=self.synced,
            relisted=self.relisted,
        )
        self._indexers = OperatorIndexers()
        self._indexers.ensure(self._registry._indexing.get_all_handlers())
        self._memories, self._settings = ResourceMemories(), make_kopf_settings(KINDS)

    async def deliver(self, plural: str, kind: Kind | None, raw: Any, **toggles: Any) -> None:
        group, _, version = RESOURCES[plural].api_version.rpartition("/")
        await process_resource_event(
            lifecycle=kopf.lifecycles.all_at_once,
            indexers=self._indexers,
            registry=self._registry,
            settings=self._settings,
            memories=self._memories,
            memobase=AnyMemo(Memo()),
            resource=KopfResource(group=group, version=version, plural=plural),
            raw_event={"type": kind, "object": raw},
            event_queue=asyncio.Queue(),
            **toggles,
        )

    async def list_all(self, world: World) -> None:
        """Deliver the first lists of all kinds: handlers of events wait until all of them are indexed."""
        indexed = ToggleSet(all)
        listed = [(plural, raw) for plural in RESOURCES for raw in world.cluster.list_objects(plural)]
        toggles = [await indexed.make_toggle() for _ in listed]
        await asyncio.gather(
            *(
                self.deliver(plural, None, raw, operator_indexed=indexed, resource_indexed=toggle)
                for (plural, raw), toggle in zip(listed, toggles, strict=True)
            )
        )


async def start_to_watch() -> tuple[World, Watches]:
    """Run job default/lm, and let a new operator list all that there is."""
    world = World()
    await world.run_until_settled(rounds=3)
    watches = Watches(Cache(lambda: world.now))
    await watches.list_all(world)
    return world, watches


async def test_the_first_list_brings_each_job_but_not_once_more_for_each_of_its_pods() -> None:
    world, watches = await start_to_watch()
    owners = 1 + len(world.cluster.list_objects("jobsets")) + len(world.cluster.list_objects("jobs"))
    assert len(world.pods) == 2
    assert watches.keys == [JOB] * owners


@pytest.mark.parametrize("kind", ["MODIFIED", None])
async def test_what_only_a_pod_waits_for_concerns_its_job(kind: Kind | None) -> None:
    world, watches = await start_to_watch()
    watches.keys.clear()
    (pod, *_) = world.pods
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "trainer:1"'}
    pod["status"]["containerStatuses"] = [{"name": "trainer", "state": {"waiting": waiting}}]
    await watches.deliver("pods", kind, pod)
    assert watches.keys == [JOB]
    await watches.deliver("pods", kind, pod)
    assert watches.keys == [JOB], "nothing has changed since"


async def test_a_node_that_goes_silent_concerns_the_jobs_with_pods_on_it() -> None:
    world, watches = await start_to_watch()
    watches.keys.clear()
    node = world.cluster.objects["nodes", None, world.pods[0]["spec"]["nodeName"]]
    unknown = {"type": "Ready", "status": "Unknown", "lastTransitionTime": render_time(world.now)}
    await watches.deliver("nodes", "MODIFIED", node | {"status": {"conditions": [unknown]}})
    assert watches.keys == [JOB]


@pytest.mark.parametrize(("kind", "relists"), [(None, True), ("MODIFIED", False), ("ADDED", False)])
async def test_a_listed_object_says_that_its_kind_was_listed(kind: Kind | None, *, relists: bool) -> None:
    world, watches = await start_to_watch()
    assert watches.synced.is_set()
    watches.keys.clear()
    watches.relisted.clear()
    await watches.deliver("jobsets", kind, world.jobset)
    assert watches.keys == [JOB]
    assert watches.relisted.is_set() is relists
