"""Feed watch events into the cache, and the keys that they concern into the queue.

Nothing here decides anything or writes to an object. kopf's high-level handlers put finalizers and annotations on
objects; its events don't. Its indices would keep all listed objects in memory, each with a task that waits for all
others, in quadratic time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import kopf
from typing_extensions import override

from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cache.kinds import WatchedKind
from stepkeeper_operator.cluster.resources import Resource

__all__ = ["make_kopf_settings", "make_registry", "run_watches"]

# A watch has to end from time to time: a broken connection reports nothing. The server ends it first.
_SERVER_TIMEOUT_S = 240
_CLIENT_TIMEOUT_S = 270
_CONNECT_TIMEOUT_S = 10

_CHUNK = 200
"""Objects of a list that are in memory at once."""

_IDLE_S = 0.1
"""Seconds for which kopf keeps an object and its task in memory after an event."""


def make_registry(
    cache: Cache,
    kinds: Iterable[WatchedKind],
    enqueue: Callable[[ObjectKey, float], None],
    *,
    relisted: asyncio.Event,
) -> Any:
    """Register handlers for these kinds.

    `relisted` is set whenever a watch lists its kind. It does so after an interruption, and then does not report the
    deletions that it missed.
    """
    registry = kopf.OperatorRegistry()
    for kind in kinds:
        _register_watch(registry, cache, kind, enqueue=enqueue, relisted=relisted)

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    return registry


class _NoDiffs(kopf.DiffBaseStorage):
    """Keep kopf from copying each object three times to find changes: no handler here looks at them."""

    @override
    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    @override
    def fetch(self, *, body: Any) -> None:
        return None

    @override
    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        return None


def make_kopf_settings(kinds: Iterable[WatchedKind]) -> Any:
    """Configure kopf to watch these kinds without writing to the cluster."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.server_timeout = _SERVER_TIMEOUT_S
    settings.watching.client_timeout = _CLIENT_TIMEOUT_S
    settings.watching.connect_timeout = _CONNECT_TIMEOUT_S
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.watching.chunk_size = _CHUNK
    settings.queueing.idle_timeout = _IDLE_S
    settings.networking.request_timeout = 30
    for kind in kinds:
        if kind.label_selector:
            settings.watching.label_selectors[_selector(kind.resource)] = kind.label_selector
    return settings


async def run_watches(
    registry: Any,
    settings: Any,
    *,
    namespaces: Sequence[str],
    stop: asyncio.Event,
    started: Callable[[], None],
) -> None:
    """Watch these namespaces until `stop` is set. Without any, watch all.

    `started` is called once kopf has installed its signal handlers, so that the caller can replace them. Tasks made
    after this one end with it, because kopf treats every such task as its own.
    """
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=settings,
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        stop_flag=stop,
    )
    started()
    await kopf.run_tasks(tasks, ignored=others)


def _register_watch(
    registry: Any,
    cache: Cache,
    kind: WatchedKind,
    *,
    enqueue: Callable[[ObjectKey, float], None],
    relisted: asyncio.Event,
) -> None:
    resource, selector = kind.resource, _selector(kind.resource)

    @kopf.on.event(*selector, registry=registry, id=f"watch-{resource.plural}")
    async def changed(event: Any, **_: Any) -> None:
        cache.record_watch_event()
        if event["type"] is None:  # the object comes from a list
            relisted.set()
        for key in cache.record(resource, event["object"], deleted=event["type"] == "DELETED"):
            enqueue(key, kind.delay_s)

    logging.getLogger(__name__).debug("watching", extra={"kind": resource.kind})


def _selector(resource: Resource) -> tuple[str, str, str]:
    group, _, version = resource.api_version.rpartition("/")
    return (group, version, resource.plural)
