"""Test the queue: each key once, never twice at a time, delays and back-off. Tests move the loop's time by hand."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise

import pytest

from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.kinds.work_queue import KindQueues, WorkQueue

Work = Callable[[str], Awaitable[float | None]]


class Bench:
    """Run a queue in a loop whose clock the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jitter = 0.0
        self.queue: WorkQueue[str] = WorkQueue(jitter=lambda: self.jitter)
        self.now = 0.0
        self.done: list[tuple[str, float]] = []
        """The keys, each with its time."""
        self._task: asyncio.Task[None] | None = None
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)

    async def start(self, work: Work | None = None) -> None:
        async def note(key: str) -> float | None:
            self.done.append((key, self.now))
            return await work(key) if work is not None else None

        self._task = asyncio.create_task(self.queue.run(2, note))
        await self.move(0)

    async def move(self, seconds: float) -> None:
        """Let time pass, and let all tasks do what they can do then."""
        self.now += seconds
        for _ in range(23):
            await asyncio.sleep(0)

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    await bench.stop()


async def test_a_key_that_changes_while_it_is_worked_on_is_worked_on_again_and_not_at_the_same_time(
    bench: Bench,
) -> None:
    gate = asyncio.Event()

    async def work(key: str) -> None:
        await gate.wait()

    for _ in range(5):
        bench.queue.add("a")
    await bench.start(work)
    bench.queue.add("b")
    for _ in range(2):
        bench.queue.add("a")
    await bench.move(1)
    assert bench.done == [("a", 0), ("b", 1)], "two keys are worked on side by side"
    gate.set()
    await bench.move(1)
    assert bench.done == [("a", 0), ("b", 1), ("a", 2)]


async def test_the_earlier_of_two_delays_counts_and_the_later_one_is_void(bench: Bench) -> None:
    await bench.start()
    for delay_s in (50, 5, 20):
        bench.queue.add_after("a", delay_s)
    bench.queue.add_after("b", 5)
    bench.queue.add("b")
    for _ in range(100):
        await bench.move(1)
    assert [(key, round(at_s)) for key, at_s in bench.done] == [("b", 1), ("a", 5)]


async def test_jitter_stretches_a_delay_and_never_shortens_it(bench: Bench) -> None:
    bench.jitter = 1.0
    await bench.start()
    bench.queue.add_after("a", 100)
    for _ in range(120):
        await bench.move(1)
    ((_, at_s),) = bench.done
    assert 105 < at_s < 112


async def test_a_failing_key_is_tried_again_ever_later_and_holds_up_no_other(bench: Bench) -> None:
    async def work(key: str) -> None:
        if key == "bad":
            raise OSError("no API server")

    bench.queue.add("bad")
    await bench.start(work)
    for _ in range(160):
        await bench.move(0.1)
    times = [at_s for _, at_s in bench.done]
    assert [after - before for before, after in pairwise(times)][:4] == pytest.approx(
        [0.5, 1, 2, 4], abs=0.25
    )
    bench.queue.add("good")
    await bench.move(0)
    assert bench.done[-1][0] == "good"
    n_tries = len(bench.done)
    for _ in range(1100):  # days later
        await bench.move(120)
    assert len(bench.done) >= n_tries + 1100


async def test_the_answer_of_the_work_says_when_the_key_is_due_again(bench: Bench) -> None:
    async def work(key: str) -> float | None:
        return 10 if len(bench.done) == 1 else None

    bench.queue.add("a")
    await bench.start(work)
    for _ in range(100):
        await bench.move(1)
    assert bench.done == [("a", 0), ("a", 10)]


async def test_a_kind_whose_work_hangs_holds_up_no_other() -> None:
    queues = KindQueues({"slow": 2, "quick": 1})
    hung: list[ObjectKey] = []
    done: asyncio.Queue[ObjectKey] = asyncio.Queue()

    async def work(key: ObjectKey) -> None:
        if key.kind == "slow":
            hung.append(key)
            await asyncio.Event().wait()
        done.put_nowait(key)

    running = asyncio.create_task(queues.run({"slow": work, "quick": work}))
    for number in range(5):
        queues.add(ObjectKey("slow", "default", str(number)))
    queues.add(ObjectKey("unknown", "default", "a"))
    await asyncio.sleep(0)
    queues.add(ObjectKey("quick", "default", "later"), 0.001)
    assert queues.count_due()["quick"] == 0
    assert await done.get() == ObjectKey("quick", "default", "later")
    assert [key.name for key in hung] == ["0", "1"], "as many as it has workers, in their order"
    assert queues.count_due() == {"slow": 3, "quick": 0}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
