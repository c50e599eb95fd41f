"""Feed watches into the cache, and the jobs that they concern into the queue.

Nothing here decides anything or writes to any object. kopf's high-level handlers put finalizers and
annotations on objects; its events and indices don't.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

import kopf

from stepkeeper_operator.cache.cache import Cache, JobKey
from stepkeeper_operator.cluster import BATCH_JOBS, JOBSETS, NODES, PODS, TRAINING_JOBS, Resource
from stepkeeper_operator.labels import JOB_UID_LABEL

__all__ = ["make_kopf_settings", "make_registry", "run_watches"]

_SERVER_TIMEOUT_S = 240
_CLIENT_TIMEOUT_S = 270
_CONNECT_TIMEOUT_S = 10
_BURST_S = 0.25
"""Pods, Jobs and JobSets change together, but their watches don't arrive together."""


class RecordObject(Protocol):
    def __call__(self, raw: Any, *, deleted: bool = False) -> tuple[JobKey, ...]:
        """Record the object in the cache. Return the keys of the jobs that it concerns."""


def make_registry(
    cache: Cache,
    enqueue: Callable[[JobKey, float], None],
    *,
    synced: asyncio.Event,
    relisted: asyncio.Event,
) -> Any:
    """Register handlers for all kinds. `synced` is set once every kind has been listed into the cache.

    `relisted` is set whenever a kind is listed: a watch that was broken doesn't announce what was deleted
    meanwhile.
    """
    registry = kopf.OperatorRegistry()
    kinds: tuple[tuple[Resource, RecordObject, float], ...] = (
        (TRAINING_JOBS, cache.record_training_job, 0.0),
        (JOBSETS, cache.record_jobset, _BURST_S),
        (BATCH_JOBS, cache.record_batch_job, _BURST_S),
        (PODS, cache.record_pod, _BURST_S),
        (NODES, cache.record_node, _BURST_S),
    )
    for resource, record, delay_s in kinds:
        _register_watch(
            registry,
            cache,
            resource,
            record,
            enqueue=enqueue,
            delay_s=delay_s,
            synced=synced,
            relisted=relisted,
        )

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    return registry


def make_kopf_settings() -> Any:
    """Configure kopf without anything that writes to the cluster."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.server_timeout = _SERVER_TIMEOUT_S
    settings.watching.client_timeout = _CLIENT_TIMEOUT_S
    settings.watching.connect_timeout = _CONNECT_TIMEOUT_S
    settings.networking.request_timeout = 30
    for resource in (JOBSETS, BATCH_JOBS, PODS):
        settings.watching.label_selectors[_selector(resource)] = JOB_UID_LABEL
    return settings


async def run_watches(
    registry: Any, settings: Any, *, stop: asyncio.Event, started: Callable[[], None]
) -> None:
    """Watch all namespaces until `stop` is set.

    `started` is called once kopf has taken over the process's signals, so that the caller can take them back.
    Tasks made after this one end with it, because kopf takes every such task for its own.
    """
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry, settings=settings, clusterwide=True, standalone=True, stop_flag=stop
    )
    started()
    await kopf.run_tasks(tasks, ignored=others)


def _register_watch(
    registry: Any,
    cache: Cache,
    resource: Resource,
    record: RecordObject,
    *,
    enqueue: Callable[[JobKey, float], None],
    delay_s: float,
    synced: asyncio.Event,
    relisted: asyncio.Event,
) -> None:
    selector = _selector(resource)

    @kopf.index(*selector, registry=registry, id=f"list-{resource.plural}")
    async def listed(body: Any, **_: Any) -> None:
        # kopf delivers events only after the objects of all kinds have passed here: the cache is complete then.
        record(dict(body))

    @kopf.on.event(*selector, registry=registry, id=f"watch-{resource.plural}")
    async def changed(event: Any, **_: Any) -> None:
        cache.record_watch_event()
        synced.set()
        if event["type"] is None:
            relisted.set()
        for key in record(event["object"], deleted=event["type"] == "DELETED"):
            enqueue(key, delay_s)

    logging.getLogger(__name__).debug("watching", extra={"kind": resource.kind})


def _selector(resource: Resource) -> tuple[str, str, str]:
    group, _, version = resource.api_version.rpartition("/")
    return (group, version, resource.plural)
