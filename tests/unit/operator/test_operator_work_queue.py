"""Test the queue: each key once, never twice at a time, delays and back-off. Tests move the loop's time by hand."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import NamedTuple

import pytest

from stepkeeper_operator.work_queue import KindQueues, WorkQueue

Work = Callable[[str], Awaitable[float | None]]


class Bench:
    """Run a queue in a loop whose clock the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: WorkQueue[str] = WorkQueue(jitter=lambda: 0.0)
        self.now = 0.0
        self.done: list[str] = []
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now)

    def start(self, work: Work | None = None, *, n_workers: int = 2) -> None:
        self._task = asyncio.create_task(self.queue.run(n_workers, work or self.note))

    async def note(self, key: str) -> None:
        self.done.append(key)

    async def rest(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def move(self, seconds: float) -> None:
        """Let time pass, and wake everybody who waits for it."""
        self.now += seconds
        for _ in range(3):
            await asyncio.sleep(0)
        await self.rest()

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def test_a_key_that_is_added_often_is_worked_on_once(bench: Bench) -> None:
    for _ in range(5):
        bench.queue.add("a")
    bench.start()
    await bench.rest()
    assert bench.done == ["a"]
    await bench.stop()


async def test_a_key_that_changes_while_it_is_worked_on_is_worked_on_again_and_not_at_the_same_time(
    bench: Bench,
) -> None:
    gate = asyncio.Event()
    running = 0

    async def work(key: str) -> None:
        nonlocal running
        running += 1
        assert running == 1
        bench.done.append(key)
        await gate.wait()
        running -= 1

    bench.queue.add("a")
    bench.start(work)
    await bench.rest()
    bench.queue.add("a")
    bench.queue.add("a")
    await bench.rest()
    assert bench.done == ["a"]
    gate.set()
    await bench.rest()
    assert bench.done == ["a", "a"]
    await bench.stop()


async def test_two_keys_are_worked_on_side_by_side(bench: Bench) -> None:
    gate = asyncio.Event()

    async def work(key: str) -> None:
        bench.done.append(key)
        await gate.wait()

    bench.queue.add("a")
    bench.queue.add("b")
    bench.start(work)
    await bench.rest()
    assert bench.done == ["a", "b"]
    gate.set()
    await bench.stop()


async def test_a_delayed_key_waits(bench: Bench) -> None:
    bench.start()
    await bench.rest()
    bench.queue.add_after("a", 5)
    await bench.move(4)
    assert bench.done == []
    await bench.move(2)
    assert bench.done == ["a"]
    await bench.stop()


async def test_the_earlier_of_two_delays_counts_and_the_later_one_is_void(bench: Bench) -> None:
    bench.start()
    await bench.rest()
    bench.queue.add_after("a", 50)
    bench.queue.add_after("a", 5)
    bench.queue.add_after("a", 20)
    await bench.move(6)
    assert bench.done == ["a"]
    await bench.move(100)
    assert bench.done == ["a"]
    await bench.stop()


async def test_what_is_worked_on_now_is_not_due_later_any_more(bench: Bench) -> None:
    bench.queue.add_after("a", 5)
    bench.queue.add("a")
    bench.start()
    await bench.move(100)
    assert bench.done == ["a"]
    await bench.stop()


async def test_a_failing_key_is_tried_again_ever_later_and_others_go_on(bench: Bench) -> None:
    times: list[float] = []

    async def work(key: str) -> None:
        if key == "bad":
            times.append(bench.now)
            raise OSError("no API server")
        bench.done.append(key)

    bench.queue.add("bad")
    bench.start(work)
    await bench.rest()
    for _ in range(160):
        await bench.move(0.1)
    bench.queue.add("good")
    await bench.rest()
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[:4] == pytest.approx([0.5, 1.0, 2.0, 4.0], abs=0.25)
    assert bench.done == ["good"]
    await bench.stop()


async def test_a_key_that_fails_for_days_is_still_tried_every_two_minutes(bench: Bench) -> None:
    async def work(key: str) -> None:
        bench.done.append(key)
        raise OSError("refused")

    bench.queue.add("bad")
    bench.start(work)
    for _ in range(1100):
        await bench.move(120)
    assert len(bench.done) >= 1100
    await bench.stop()


async def test_the_answer_of_the_work_says_when_the_key_is_due_again(bench: Bench) -> None:
    async def work(key: str) -> float | None:
        bench.done.append(key)
        return 10 if len(bench.done) == 1 else None

    bench.queue.add("a")
    bench.start(work)
    await bench.rest()
    await bench.move(9)
    assert bench.done == ["a"]
    await bench.move(2)
    assert bench.done == ["a", "a"]
    await bench.move(100)
    assert bench.done == ["a", "a"]
    await bench.stop()


async def test_jitter_stretches_a_delay_and_never_shortens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.queue = WorkQueue(jitter=lambda: 1.0)
    bench.start()
    await bench.rest()
    bench.queue.add_after("a", 100)
    await bench.move(105)
    assert bench.done == []
    await bench.move(6)
    assert bench.done == ["a"]
    await bench.stop()


class Key(NamedTuple):
    kind: str
    name: str


async def test_a_kind_whose_work_hangs_holds_up_no_other() -> None:
    queues: KindQueues[Key] = KindQueues({"slow": 2, "quick": 1})
    hung: list[Key] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        if key.kind == "slow":
            hung.append(key)
            await asyncio.Event().wait()
        done.set()

    running = asyncio.create_task(queues.run(work))
    for number in range(5):
        queues.add(Key("slow", str(number)))
    queues.add(Key("unknown", "a"))
    await asyncio.sleep(0)
    queues.add(Key("quick", "a"))
    await done.wait()
    assert [key.name for key in hung] == ["0", "1"], "as many as it has workers, in their order"
    assert queues.count_due() == {"slow": 3, "quick": 0}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_delayed_key_is_worked_on_by_its_kind() -> None:
    queues: KindQueues[Key] = KindQueues({"quick": 1})
    done: asyncio.Queue[Key] = asyncio.Queue()
    running = asyncio.create_task(queues.run(done.put))
    queues.add(Key("quick", "later"), 0.001)
    assert queues.count_due() == {"quick": 0}
    assert await done.get() == Key("quick", "later")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
