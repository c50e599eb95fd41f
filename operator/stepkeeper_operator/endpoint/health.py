"""Serve /healthz and /metrics."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from aiohttp import web

from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.metrics import Metrics

__all__ = ["make_health_app"]

_MAX_WATCH_AGE_S: Final = 1200
"""A kubelet updates its node's status at least every 5 minutes: a longer silence means that the watches are broken."""

_MAX_LABEL: Final = 200


def make_health_app(
    *,
    cache: Cache,
    metrics: Metrics,
    acting: Callable[[], bool],
    queue_lengths: Callable[[], Mapping[str, int]],
    waits_for: Callable[[], str],
) -> web.Application:
    """Make the application. Any answer shows that the event loop runs.

    `queue_lengths` returns the number of objects that wait for a worker, by kind; `waits_for` the obstacle to the
    operator's start, empty if there is none.
    """

    async def healthz(_: web.Request) -> web.Response:
        age_s = time.time() - cache.last_event_at
        n_nodes, _n_unknown = cache.count_nodes()
        # An operator that waits for the Lease watches nothing yet.
        silent = acting() and n_nodes > 0 and age_s > _MAX_WATCH_AGE_S
        body = {"acting": acting(), "watch_age_s": int(age_s), "waits_for": waits_for()}
        return web.json_response(body, status=500 if silent else 200)

    async def render(_: web.Request) -> web.Response:
        for kind, length in queue_lengths().items():
            metrics.queue_length.labels(kind=kind).set(length)
        metrics.watch_age_seconds.set(time.time() - cache.last_event_at)
        metrics.queued_resources.update_list_ages(time.time())
        metrics.acting.set(acting())
        metrics.waits_for.clear()
        if waits_for():
            metrics.waits_for.labels(waits_for()[:_MAX_LABEL]).set(1)
        return web.Response(body=metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics", render)
    return app
