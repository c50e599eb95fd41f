"""Queue the keys of objects that are due to be reconciled, and run the workers: a queue and workers for each kind."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Generic, TypeAlias, TypeVar

from stepkeeper_operator.cache.keys import ObjectKey

__all__ = ["KindQueues", "Reconcile", "WorkQueue"]

K = TypeVar("K", bound=Hashable)

Reconcile: TypeAlias = Callable[[ObjectKey], Awaitable[float | None]]
"""Reconciles an object, and returns the seconds until it is due again, or None."""

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 120.0
_MAX_DOUBLINGS = 16
"""The delay has reached its maximum by then. Without a limit, the power would overflow a float after days."""

_JITTER = 0.1
"""Largest share added to a delay, so that a thousand jobs that started together spread out."""


class WorkQueue(Generic[K]):
    """Queue keys that are due, at once or later. A key is queued at most once, and no two workers have the same key.

    A failed key is retried with growing delays. Call all methods from the event loop that runs `run`.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._due: asyncio.Queue[K] = asyncio.Queue()
        self._waiting: set[K] = set()
        """The keys in `_due`."""
        self._in_work: set[K] = set()
        self._again: set[K] = set()
        """Keys that were added while a worker had them: due as soon as it is done."""
        self._later: dict[K, asyncio.TimerHandle] = {}
        """The delays of keys that wait for one."""
        self._failures: dict[K, int] = {}

    def add(self, key: K) -> None:
        """Queue the key now, unless it is queued already; this ends its delay.

        If a worker has the key, it is reconciled once more afterwards.
        """
        self._end_delay(key)
        if key in self._in_work:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._due.put_nowait(key)

    def add_after(self, key: K, delay_s: float) -> None:
        """Add the key after the delay, unless it is reconciled or added earlier."""
        loop = asyncio.get_running_loop()
        due_at = loop.time() + delay_s * (1 + _JITTER * self._jitter())
        if key in self._later and due_at >= self._later[key].when():
            return
        self._end_delay(key)
        self._later[key] = loop.call_at(due_at, self.add, key)

    def _end_delay(self, key: K) -> None:
        if (timer := self._later.pop(key, None)) is not None:
            timer.cancel()

    def __len__(self) -> int:
        """Count the keys that are due and wait for a worker."""
        return len(self._waiting)

    async def run(self, n_workers: int, work: Callable[[K], Awaitable[float | None]]) -> None:
        """Work until cancelled. `work` returns the seconds until the key is due again, or None.

        After an exception from `work`, the key is retried after a growing delay. `work` logs its own errors.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(n_workers):
                group.create_task(self._worker(work))

    async def _worker(self, work: Callable[[K], Awaitable[float | None]]) -> None:
        while True:
            key = await self._due.get()
            self._waiting.discard(key)
            self._end_delay(key)
            self._in_work.add(key)
            try:
                delay_s = await work(key)
            except Exception:  # an error of one object must not stop the others
                n_failed = self._failures[key] = self._failures.get(key, 0) + 1
                delay_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(n_failed - 1, _MAX_DOUBLINGS))
            else:
                self._failures.pop(key, None)
            finally:
                self._in_work.discard(key)
            if delay_s is not None:
                self.add_after(key, delay_s)
            if key in self._again:
                self._again.discard(key)
                self.add(key)


class KindQueues:
    """Give each kind its own queue and workers, so that a slow kind doesn't delay the others."""

    def __init__(self, n_workers: Mapping[str, int]) -> None:
        """Make a queue for each kind, with the given number of workers."""
        self._n_workers = dict(n_workers)
        self._queues: dict[str, WorkQueue[ObjectKey]] = {kind: WorkQueue() for kind in n_workers}

    def add(self, key: ObjectKey, delay_s: float = 0.0) -> None:
        """Queue the key, at once or after a delay. A key of another kind has no worker and is dropped."""
        queue = self._queues.get(key.kind)
        if queue is None:
            return
        if delay_s > 0:
            queue.add_after(key, delay_s)
        else:
            queue.add(key)

    def count_due(self) -> dict[str, int]:
        """Count the keys that wait for a worker, by kind."""
        return {kind: len(queue) for kind, queue in self._queues.items()}

    async def run(self, work: Mapping[str, Reconcile]) -> None:
        """Work on all kinds until cancelled, each with its own `work`, as `WorkQueue.run` does."""
        async with asyncio.TaskGroup() as group:
            for kind, queue in self._queues.items():
                group.create_task(queue.run(self._n_workers[kind], work[kind]))
