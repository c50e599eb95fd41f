"""What a process waits for has as long as it makes progress, and stands still no longer than its speed explains."""

from concurrent.futures import Future
from typing import Any

import pytest

from stepkeeper.companion import client
from stepkeeper.storage.moved import MovedBytes, create_counter, read_counter
from stepkeeper.time_limits import TimeLimits

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
def test_the_limit_of_a_share_follows_what_was_measured(
    measured: tuple[int, float] | None, size_bytes: int, limit_s: float
) -> None:
    limits = TimeLimits()
    if measured is not None:
        limits.record_share(*measured)
    assert limits.share_silence_s(size_bytes) == limit_s
    assert limits.vote_s(size_bytes) == 2 * limit_s


@pytest.mark.parametrize(
    ("group_s", "waited_s", "apart_s", "answer_s"),
    [
        (1800, [], 3600, 300),
        (1800, [1.0], 1800, 300),
        (1800, [1200.0, 1.0], 4800, 300),
        (60, [], 120, 60),
        (60, [2.0], 60, 60),
    ],
)
def test_ranks_may_be_as_far_apart_as_in_a_collective_or_somewhat_more_than_they_were(
    group_s: float, waited_s: list[float], apart_s: float, answer_s: float
) -> None:
    limits = TimeLimits(group_s)
    for each in waited_s:
        limits.record_meeting(each)
    assert (limits.apart_s, limits.start_s, limits.store_answer_s) == (apart_s, 2 * group_s, answer_s)


def test_a_few_bytes_tell_no_speed() -> None:
    limits = TimeLimits()
    limits.record_share(1000, 300.0)
    limits.record_transfer(1000, 300.0)
    assert limits.share_silence_s(10 * GB) == 900
    assert limits.transfer_s(10 * GB) == 1800


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
