"""The gRPC server in front of a service."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from grpc import aio

from tpuapi.clock import ScaledClock
from tpuapi.core.values import Version
from tpuapi.fake import FakeTpu
from tpuapi.machine.advance import next_due
from tpuapi.wire.services import operations_service, tpu_service

LONGEST_NAP_S = 0.2


@contextlib.asynccontextmanager
async def serving(
    fake: FakeTpu, host: str = "127.0.0.1", port: int = 0, *, versions: Iterable[Version] = Version
) -> AsyncIterator[str]:
    """Answer the calls of real clients while the context lasts.

    Args:
        fake: The service.
        host: The address to listen at.
        port: Its port; 0 for a free one.
        versions: The versions of the API that there are.

    Yields:
        `host:port`, plaintext.
    """
    server = aio.server()
    invoke = fake.engine.invoke
    server.add_generic_rpc_handlers((*(tpu_service(v, invoke) for v in versions), operations_service(invoke)))
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    clock = asyncio.create_task(_run(fake, fake.clock)) if isinstance(fake.clock, ScaledClock) else None
    try:
        yield f"{host}:{bound}"
    finally:
        if clock is not None:
            clock.cancel()
        fake.clear_faults()
        await server.stop(grace=None)


async def _run(fake: FakeTpu, clock: ScaledClock) -> None:
    """Let things happen at their time also while nobody calls."""
    while True:
        fake.engine.advance()
        due = next_due(fake.engine.world)
        wait_s = LONGEST_NAP_S if due is None else clock.real_s(due - clock.now())
        await asyncio.sleep(min(max(wait_s, 0.001), LONGEST_NAP_S))
