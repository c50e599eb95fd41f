"""The service's command line: `python -m tpuapi serve --help`."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from tpuapi.admin import admin_app
from tpuapi.clock import ScaledClock, SteppedClock
from tpuapi.core.world import Habits, Timings
from tpuapi.fake import FakeTpu
from tpuapi.hooks import CommandHook
from tpuapi.server import serving


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it."""
    arguments = _parser().parse_args(argv)
    asyncio.run(_serve(arguments))
    return 0


async def _serve(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    clock = ScaledClock(arguments.speed) if arguments.speed else SteppedClock()
    fake = FakeTpu(clock, timings=_timings(arguments.timing), habits=_habits(arguments.habit))
    async with contextlib.AsyncExitStack() as stack:
        hook = await _add_hook(stack, fake, arguments)
        address = await stack.enter_async_context(serving(fake, arguments.host, arguments.port))
        admin = await _start_admin(stack, fake, hook, arguments)
        if hook is not None:
            hook.admin = admin
        print(json.dumps({"address": address, "admin": admin}), flush=True)
        await stop.wait()


async def _add_hook(
    stack: contextlib.AsyncExitStack, fake: FakeTpu, arguments: argparse.Namespace
) -> CommandHook | None:
    if not arguments.hook:
        return None
    folder = arguments.hook_folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
    hook = CommandHook(shlex.split(arguments.hook), folder, max_nodes=arguments.hook_nodes)
    fake.add_hook(hook)
    stack.push_async_callback(hook.stop)
    return hook


async def _start_admin(
    stack: contextlib.AsyncExitStack, fake: FakeTpu, hook: CommandHook | None, arguments: argparse.Namespace
) -> str:
    runner = web.AppRunner(admin_app(fake, hook))
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, arguments.host, arguments.admin_port).start()
    host, port = runner.addresses[0][:2]
    return f"{host}:{port}"


def _timings(changes: list[str]) -> Timings:
    names = {field.name for field in dataclasses.fields(Timings)}
    values = dict(change.split("=", 1) for change in changes)
    if not names >= values.keys():
        sys.exit(f"--timing takes NAME=SECONDS of {', '.join(sorted(names))}")
    return dataclasses.replace(Timings(), **{name: float(value) for name, value in values.items()})


def _habits(changes: list[str]) -> Habits:
    values = dict(change.split("=", 1) for change in changes)
    names = {field.name for field in dataclasses.fields(Habits)}
    if not names >= values.keys():
        sys.exit(f"--habit takes NAME=VALUE, as JSON, of {', '.join(sorted(names))}")
    return dataclasses.replace(Habits(), **{name: json.loads(value) for name, value in values.items()})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpuapi", description="A Cloud TPU API to test against.")
    serve = parser.add_subparsers(required=True).add_parser("serve", help="serve until a signal ends it")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=0, help="of the API, plaintext; 0: a free one")
    serve.add_argument("--admin-port", type=int, default=0, help="of the side door; 0: a free one")
    serve.add_argument(
        "--speed", type=float, default=1.0, help="of its clock; 0: it stands still until it is stepped"
    )
    serve.add_argument("--timing", action="append", default=[], metavar="NAME=SECONDS")
    serve.add_argument("--habit", action="append", default=[], metavar="NAME=VALUE")
    serve.add_argument(
        "--hook", default="", metavar="COMMAND", help="to run when something happens to a node"
    )
    serve.add_argument(
        "--hook-nodes", type=int, help="run it for at most so many nodes at once; by default all"
    )
    serve.add_argument(
        "--hook-folder", type=Path, help="for the scripts of nodes; by default a temporary one"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
