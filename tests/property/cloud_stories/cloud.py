"""A Cloud TPU API in memory whose lists take as long as a story wants."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from typing_extensions import override

from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudNode, CloudQueuedResource, Place
from tpuapi.cloud import FakeCloud
from tpuapi.nodes import Timings

T = TypeVar("T")


class SlowCloud(FakeCloud):
    """Answer each list after `slow_s`, with what there was when it began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock, timings=Timings(provisioning_s=40, preempted_s=45))
        self.slow_s = 0.0
        self._slow: list[tuple[float, asyncio.Event]] = []
        """Lists that go on: when each ends, and what tells it."""

    @override
    async def list_queued_resources(
        self, place: Place, version: ApiVersion
    ) -> tuple[CloudQueuedResource, ...]:
        return await self._take_time(super().list_queued_resources(place, version))

    @override
    async def list_nodes(self, place: Place, version: ApiVersion) -> tuple[CloudNode, ...]:
        return await self._take_time(super().list_nodes(place, version))

    def end_lists(self) -> None:
        """Let the lists end whose time is over."""
        for ends_at, end in self._slow:
            if ends_at <= self.now():
                end.set()
        self._slow = [each for each in self._slow if not each[1].is_set()]

    async def _take_time(self, listing: Awaitable[T]) -> T:
        answer = await listing
        if self.slow_s:
            end = asyncio.Event()
            self._slow.append((self.now() + self.slow_s, end))
            await end.wait()
        return answer
