"""A share of a save has as long as it makes progress, and stands still no longer than its speed explains."""

from concurrent.futures import Future
from typing import Any

import pytest

from stepkeeper.companion import client
from stepkeeper.save.share_limit import ShareSpeed
from stepkeeper.storage.moved import MovedBytes, create_counter, read_counter

GB = 10**9


@pytest.mark.parametrize(
    ("measured", "size_bytes", "limit_s"),
    [
        (None, 0, 900),
        (None, 10 * GB, 900),
        (None, 100 * GB, 5000),
        ((10 * GB, 10.0), 100 * GB, 900),
        ((GB, 100.0), 10 * GB, 4000),
        ((0, 5.0), 100 * GB, 5000),
    ],
)
def test_the_limit_follows_what_was_measured(
    measured: tuple[int, float] | None, size_bytes: int, limit_s: float
) -> None:
    speed = ShareSpeed()
    if measured is not None:
        speed.record_share(*measured)
    assert speed.silence_limit_s(size_bytes) == limit_s


class Clock:
    """Goes on by what is waited."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Slow(Future[dict[str, Any]]):
    """An answer that comes at `due_s`."""

    def __init__(self, clock: Clock, due_s: float) -> None:
        super().__init__()
        self.clock = clock
        self.due_s = due_s

    def result(self, timeout: float | None = None) -> dict[str, Any]:  # type: ignore[explicit-override]  # Python 3.11 has none
        assert timeout is not None
        self.clock.now_s = min(self.due_s, self.clock.now_s + timeout)
        if self.clock.now_s < self.due_s:
            raise TimeoutError
        return {"durable": True}


@pytest.mark.parametrize(
    ("moves_until_s", "due_s", "ended_s"),
    [(7200, 7200, None), (0, 90, None), (0, 200, 100), (5000, 7200, 5100), (7150, 7200, None)],
)
def test_only_silence_ends_the_wait_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, moves_until_s: float, due_s: float, ended_s: float | None
) -> None:
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)

    def moves() -> bool:
        return 0 < clock.now_s <= moves_until_s

    answer = Slow(clock, due_s)
    if ended_s is None:
        assert client._await_answer(answer, 100.0, 100.0, moves) == {"durable": True}
        return
    with pytest.raises(TimeoutError):
        client._await_answer(answer, 100.0, 100.0, moves)
    assert ended_s <= clock.now_s <= ended_s + 2 * client._LOOK_S


def test_the_count_is_read_by_another_process() -> None:
    moved, counter = MovedBytes(), create_counter()
    fd = counter.fd
    try:
        moved.note(3)
        assert read_counter(fd) == 0
        moved.share(fd)
        assert read_counter(fd) == 3
        moved.note(4)
        assert (read_counter(fd), moved.n_bytes) == (7, 7)
    finally:
        counter.close()
