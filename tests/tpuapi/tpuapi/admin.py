"""The tests' side door, by HTTP: everything that a test may do to the service, and what it has seen."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tpuapi.core.values import NodeEvent
from tpuapi.fake import FakeTpu
from tpuapi.hooks import CommandHook
from tpuapi.wire.status import to_proto
from tpuapi.wire.views import view_node, view_queued

ACTIONS = (
    "add_reservation",
    "add_symptom",
    "announce_maintenance",
    "cancel_maintenance",
    "clear_faults",
    "fail",
    "fail_deletions",
    "forget_calls",
    "hold",
    "inject_error",
    "inject_latency",
    "inject_quota_error",
    "preempt",
    "processes_exited",
    "release",
    "set_capacity",
    "set_habits",
    "set_health",
    "set_quota",
    "set_timings",
    "set_unreachable",
    "show_node",
    "show_queued_resource",
    "step",
    "step_to_next",
)
"""Methods of FakeTpu that a POST to /v1/{action} calls, with the fields of its JSON body as arguments."""

Handler = Callable[[web.Request], Awaitable[web.Response]]


def admin_app(fake: FakeTpu, hook: CommandHook | None = None) -> web.Application:
    """Make the application; the README lists its paths."""
    app = web.Application()
    app.router.add_get("/v1/state", _answering(lambda _: _state(fake)))
    app.router.add_get("/v1/calls", _answering(lambda _: [dataclasses.asdict(call) for call in fake.calls]))
    app.router.add_get("/v1/counts", _answering(lambda _: dict(fake.engine.counts())))
    app.router.add_get("/v1/events", _answering(lambda request: _events(fake, request)))
    app.router.add_get("/v1/hook-runs", _answering(lambda _: _hook_runs(hook)))
    app.router.add_post("/v1/{action}", _acting(fake))
    return app


def _answering(answer: Callable[[web.Request], Any]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(answer(request))

    return handle


def _acting(fake: FakeTpu) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        action = request.match_info["action"]
        if action not in ACTIONS:
            return web.json_response(
                {"error": f"there is no action '{action}': {', '.join(ACTIONS)}"}, status=404
            )
        arguments = await request.json() if request.can_read_body else {}
        try:
            result = getattr(fake, action)(**arguments)
        except (LookupError, TypeError, ValueError) as error:
            return web.json_response({"error": f"{action}: {error}"}, status=400)
        return web.json_response({"result": result})

    return handle


def _state(fake: FakeTpu) -> dict[str, Any]:
    fake.engine.advance()
    world = fake.engine.world
    return {
        "now": world.now,
        "queued_resources": [view_queued(each) for each in world.queued.values()],
        "errors": {r.name: to_proto(r.error).message for r in world.queued.values() if r.error is not None},
        "nodes": [view_node(each) for each in world.nodes.values()],
        "operations": [
            {"name": o.name, "verb": o.verb, "target": o.target, "done": o.end_time is not None}
            for o in world.operations.values()
        ],
    }


def _events(fake: FakeTpu, request: web.Request) -> list[dict[str, Any]]:
    fake.engine.advance()
    after = int(request.query.get("after", "0"))
    return [_view_event(number, event) for number, event in enumerate(fake.events, start=1) if number > after]


def _view_event(number: int, event: NodeEvent) -> dict[str, Any]:
    return {
        "number": number,
        "kind": event.kind.value,
        "reason": event.reason,
        "at": event.at,
        "deadline": event.deadline,
        "node": view_node(event.node),
    }


def _hook_runs(hook: CommandHook | None) -> list[dict[str, Any]]:
    return [] if hook is None else [dataclasses.asdict(run) for run in hook.runs]
