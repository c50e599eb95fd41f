"""Queue the keys to reconcile: coalescing, serial per key, delayed requeue with jitter, back-off, a queue per kind."""

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Generic, Protocol, TypeVar

__all__ = ["KindQueues", "WorkQueue"]

K = TypeVar("K", bound=Hashable)

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 120.0
_MOST_DOUBLINGS = 16
"""By then a delay is the greatest. The power of a key that fails for days would be too large for a float."""

_JITTER = 0.1
"""Greatest share by which a delay is stretched, so that a thousand jobs that started together don't stay together."""


class WorkQueue(Generic[K]):
    """Queue keys that are due. A key waits at most once, and no two workers hold the same key.

    Call all methods but `run` from the event loop that `run` runs in.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._due: asyncio.Queue[K] = asyncio.Queue()
        self._waiting: set[K] = set()
        """The keys in `_due`."""
        self._held: set[K] = set()
        self._again: set[K] = set()
        """Keys added while a worker held them: due as soon as the worker is done."""
        self._later: dict[K, float] = {}
        """The earliest time that a delayed key is due at."""
        self._timers: list[tuple[float, int, K]] = []
        self._timer_id = 0
        self._timer_set = asyncio.Event()
        self._failures: dict[K, int] = {}

    def add(self, key: K) -> None:
        """Queue the key, unless it is queued already; a delay that it waits for ends.

        If a worker has it now, reconcile it once more afterwards.
        """
        self._later.pop(key, None)
        if key in self._held:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._due.put_nowait(key)

    def add_after(self, key: K, delay_s: float) -> None:
        """Add the key after the delay, unless it is reconciled or added earlier."""
        due_at = asyncio.get_running_loop().time() + delay_s * (1 + _JITTER * self._jitter())
        if due_at >= self._later.get(key, float("inf")):
            return
        self._later[key] = due_at
        self._timer_id += 1
        heapq.heappush(self._timers, (due_at, self._timer_id, key))
        self._timer_set.set()

    def __len__(self) -> int:
        """Count the keys that are due and that no worker has taken yet."""
        return len(self._waiting)

    async def run(self, n_workers: int, work: Callable[[K], Awaitable[float | None]]) -> None:
        """Work until cancelled. `work` returns in how many seconds the key is due again, or None.

        An exception from `work` means that the key has to be tried again after a growing delay. `work` logs
        what went wrong itself.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_delayed())
            for _ in range(n_workers):
                group.create_task(self._worker(work))

    async def _worker(self, work: Callable[[K], Awaitable[float | None]]) -> None:
        while True:
            key = await self._due.get()
            self._waiting.discard(key)
            self._later.pop(key, None)
            self._held.add(key)
            try:
                delay_s = await work(key)
            except Exception:  # whatever one job's reconcile raises, the other jobs go on
                n_failed = self._failures[key] = self._failures.get(key, 0) + 1
                delay_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(n_failed - 1, _MOST_DOUBLINGS))
            else:
                self._failures.pop(key, None)
            finally:
                self._held.discard(key)
            if delay_s is not None:
                self.add_after(key, delay_s)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    async def _wake_delayed(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._timers and self._timers[0][0] <= loop.time():
                due_at, _, key = heapq.heappop(self._timers)
                # A timer that was overtaken by an earlier one, or by the work itself, is void.
                if self._later.get(key) == due_at:
                    self.add(key)
            timeout_s = self._timers[0][0] - loop.time() if self._timers else None
            self._timer_set.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._timer_set.wait()
            except TimeoutError:
                continue


class _OfKind(Hashable, Protocol):
    """A key that says what it is a key of."""

    @property
    def kind(self) -> str:
        """The kind of the object."""


Q = TypeVar("Q", bound=_OfKind)


class KindQueues(Generic[Q]):
    """Give each kind a queue and workers of its own: one whose work takes long holds up no other."""

    def __init__(self, n_workers: Mapping[str, int]) -> None:
        """Make a queue for each of these kinds, for so many workers."""
        self._n_workers = dict(n_workers)
        self._queues: dict[str, WorkQueue[Q]] = {kind: WorkQueue() for kind in n_workers}

    def add(self, key: Q, delay_s: float = 0.0) -> None:
        """Queue the key, at once or after a delay. Nobody works on a key of another kind: it is dropped."""
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

    async def run(self, work: Callable[[Q], Awaitable[float | None]]) -> None:
        """Work on all kinds until cancelled, each as `WorkQueue.run` does."""
        async with asyncio.TaskGroup() as group:
            for kind, queue in self._queues.items():
                group.create_task(queue.run(self._n_workers[kind], work))
