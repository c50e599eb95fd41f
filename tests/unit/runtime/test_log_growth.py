"""The cost of a log that keeps every commit: in bytes, and to open."""

import pytest

from stepkeeper.log import Log, LogState
from stepkeeper.log.indexes import base_slot
from stepkeeper.log.replay import apply
from stepkeeper.log.tail import find_tail
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import DEFAULT_PATIENCE
from stepkeeper.testing.long_log import long_log


def bucket_of(n_commits: int) -> MemoryBucket:
    bucket = MemoryBucket()
    bucket.objects = dict(long_log(n_commits))
    return bucket


def test_a_long_log_for_tests_is_as_its_own_code_would_have_it() -> None:
    log = Log(MemoryStore(bucket_of(300)))
    whole = LogState()
    for slot in range(301):
        whole = apply(whole, slot, log.entry(slot))
    assert log.open() == whole
    assert log.begin().slot == 301


def test_bytes_grow_with_the_commits_and_not_faster() -> None:
    small, large = (sum(map(len, bucket_of(n).objects.values())) / n for n in (2_000, 8_000))
    # Four times as many commits are one more index that each of them is written to, half as often as it is in them.
    assert large - small < 400
    assert large < 1.4 * small


def n_indexes(slot: int) -> int:
    """How many indexes the state after `slot` stands on."""
    found = 1
    while slot:
        slot = base_slot(slot)
        found += 1
    return found


def n_reads(tail: int) -> int:
    """How many entries are read to open a log with this last slot, and to see that no more came."""
    index = tail - tail % 8
    return (tail - index) + n_indexes(index) + 1


def test_no_log_of_a_hundred_thousand_entries_takes_twenty_requests_to_open() -> None:
    assert max(map(n_reads, range(131_072))) + 2 < 20
    # Behind a begin, which has an index of its own.
    assert max(n_indexes(tail) + 7 - tail % 8 + 1 for tail in range(131_072) if tail % 8) + 2 < 20


@pytest.mark.parametrize("n_commits", [999, 1_000, 1_535, 1_536, 2_559])
def test_a_log_is_opened_with_as_many_requests_as_that(n_commits: int) -> None:
    asked: list[str] = []

    def hook(moment: str, operation: str, path: str) -> None:
        if moment == "before":
            asked.append(operation)

    state = Log(MemoryStore(bucket_of(n_commits), hook=hook)).open()
    assert (state.tail, len(state.line)) == (n_commits, n_commits)
    assert asked.count("read") == n_reads(n_commits)
    assert asked.count("list") <= 2
    assert len(asked) == asked.count("read") + asked.count("list")


@pytest.mark.long
def test_a_hundred_thousand_commits_are_opened_with_less_than_twenty_requests() -> None:
    bucket = bucket_of(100_000)
    asked: list[tuple[str, str]] = []
    store = MemoryStore(bucket, hook=lambda moment, operation, _: asked.append((moment, operation)))
    assert find_tail(store, DEFAULT_PATIENCE) == 100_000
    assert len(asked) == 4, "two pages"
    asked.clear()
    state = Log(store).open()
    assert (state.tail, len(state.line)) == (100_000, 100_000)
    requests = [operation for moment, operation in asked if moment == "before"]
    assert requests.count("read") == n_reads(100_000)
    assert requests.count("list") == 2
    assert len(requests) < 20
