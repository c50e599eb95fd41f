"""The service as a process, with a side door for its tests: `python -m tpuapi serve --help`."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from stepkeeper_operator.cloud_tpu.cloud import ApiVersion
from tpuapi.cloud import FakeCloud
from tpuapi.hooks import CommandHook
from tpuapi.nodes import Timings
from tpuapi.wire import serving, view_node, view_queued_resource

ACTIONS = (
    "announce_maintenance",
    "clear_faults",
    "fail",
    "forget_calls",
    "hold",
    "inject_error",
    "preempt",
    "processes_exited",
    "release",
    "set_capacity",
    "set_quota",
    "set_timings",
)
"""Methods of FakeCloud that a POST to /v1/{action} calls, with the fields of its JSON body as arguments."""


async def _serve(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    cloud = FakeCloud(time.time, timings=_read_timings(arguments.timing))
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hook = CommandHook(shlex.split(arguments.hook), folder, max_nodes=arguments.hook_nodes)
        stack.push_async_callback(hook.stop)
        if arguments.hook:
            cloud.hooks.append(hook)
        runner = web.AppRunner(make_side_door(cloud, hook))
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, arguments.host, 0).start()
        host, port = runner.addresses[0][:2]
        hook.admin = f"{host}:{port}"
        address = await stack.enter_async_context(serving(cloud, arguments.host))
        print(json.dumps({"address": address, "admin": hook.admin}), flush=True)
        await stop.wait()


def make_side_door(cloud: FakeCloud, hook: CommandHook) -> web.Application:
    """Make an HTTP application by which tests do to the service what they may, and see what it has seen."""
    app = web.Application()
    app.router.add_get("/v1/state", _answering(lambda: _view_state(cloud)))
    app.router.add_get("/v1/calls", _answering(lambda: [dataclasses.asdict(call) for call in cloud.calls]))
    app.router.add_get("/v1/counts", _answering(cloud.counts))
    app.router.add_get("/v1/hook-runs", _answering(lambda: [dataclasses.asdict(run) for run in hook.runs]))
    app.router.add_post("/v1/{action}", _acting(cloud))
    return app


def _answering(look: Callable[[], Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(look())

    return answer


def _acting(cloud: FakeCloud) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def act(request: web.Request) -> web.Response:
        action = request.match_info["action"]
        try:
            if action not in ACTIONS:
                raise LookupError(f"there is none but {', '.join(ACTIONS)}")
            arguments = await request.json() if request.can_read_body else {}
            return web.json_response({"result": getattr(cloud, action)(**arguments)})
        except (LookupError, TypeError, ValueError) as error:
            return web.json_response({"error": f"{action}: {error}"}, status=400)

    return act


def _view_state(cloud: FakeCloud) -> dict[str, Any]:
    cloud.advance()
    resources = cloud.resources.values()
    return {
        "queued_resources": [view_queued_resource(each, ApiVersion.V2ALPHA1) for each in resources],
        "nodes": [view_node(each) for each in cloud.nodes.values()],
    }


def _read_timings(changes: list[str]) -> Timings:
    names = {field.name for field in dataclasses.fields(Timings)}
    values = dict(change.split("=", 1) for change in changes)
    if not names >= values.keys():
        sys.exit(f"--timing takes NAME=SECONDS of {', '.join(sorted(names))}")
    return Timings(**{name: float(value) for name, value in values.items()})


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpuapi", description="A Cloud TPU API to test against.")
    serve = parser.add_subparsers(required=True).add_parser("serve", help="serve until a signal ends it")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--timing", action="append", default=[], metavar="NAME=SECONDS")
    serve.add_argument(
        "--hook", default="", metavar="COMMAND", help="to run when something happens to a node"
    )
    serve.add_argument(
        "--hook-nodes", type=int, help="run it for at most so many nodes at once; by default all"
    )
    return parser


if __name__ == "__main__":
    asyncio.run(_serve(_make_parser().parse_args()))
