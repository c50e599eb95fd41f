"""No wait of the train thread outlasts a notice or the loss of a rank, as processes with real signals."""

import os
import random
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rank_talk import hear
from waiting_ranks import GRACE_S, Ranks, ends_in_time, ends_within, head_step

from stepkeeper.contract import ExitCode, Termination

PATIENCE_S = 60.0
"""The loss of a rank is heard of within a second. Saves in flight, Python's end and a busy machine take longer."""


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


GRACES: tuple[dict[str, int], ...] = ({"grace_s": GRACE_S}, {})
EACH_WAITS_OTHERWISE = (("step", 0), ("step", 1), ("save", 0), ("wait", 0), ("restore_latest", 0), ("end", 0))
LIKE_THESE = (
    *((call, 0) for call in ("save_async", "join", "restore", "verify", "result", "close")),
    *((call, 1) for call in ("join", "restore_latest", "end")),
)


@pytest.mark.parametrize(
    ("call", "grace"),
    [
        *((call, GRACES[number]) for call, number in EACH_WAITS_OTHERWISE),
        *(pytest.param(call, GRACES[number], marks=pytest.mark.long) for call, number in LIKE_THESE),
    ],
)
def test_a_call_that_waits_for_a_save_that_is_stuck_ends_with_the_notice(
    tmp_path: Path, ranks: Ranks, call: str, grace: dict[str, int]
) -> None:
    with ranks(f"wait-{call}", **grace) as (process,), stopped(hear(process, "companion")["pid"]):
        hear(process, "waits")
        time.sleep(0.5)
        told_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = ends_in_time(process, told_s, grace)
    assert code == ExitCode.SAVED
    if grace:
        said = Termination.from_json((tmp_path / "termination.0").read_bytes())
        assert (said.code, said.notice) == (ExitCode.SAVED, "sigterm")
    assert head_step(tmp_path) == 1


@pytest.mark.parametrize("grace", GRACES, ids=["known", "unknown"])
@pytest.mark.parametrize(
    "call",
    [
        "restore_latest-.distcp",
        "all_steps",
        *(
            pytest.param(call, marks=pytest.mark.long)
            for call in (
                *("restore_latest", "restore", "restore-.distcp", "restore-manifest.0.json"),
                *("verify", "verify-.distcp", "metadata", "metadata-manifest.0.json"),
            )
        ),
    ],
)
def test_a_call_that_reads_from_a_store_that_hangs_ends_with_the_notice(
    tmp_path: Path, ranks: Ranks, call: str, grace: dict[str, int]
) -> None:
    with ranks(f"read-{call}", **grace) as (process,):
        hear(process, "waits")
        time.sleep(0.5)
        told_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert ends_in_time(process, told_s, grace) == ExitCode.SAVED
    assert head_step(tmp_path) == 1


@pytest.mark.parametrize(
    ("how", "interval"),
    [
        ("raise", 1),
        ("kill", 10**6),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("raise", 10**6), ("kill", 1))),
        *(pytest.param("exit", interval, marks=pytest.mark.long) for interval in (1, 10**6)),
    ],
)
def test_a_rank_that_leaves_ends_the_others_without_a_collective(
    tmp_path: Path, ranks: Ranks, how: str, interval: int
) -> None:
    with ranks(f"lose-{how}", 2, interval=interval) as (first, last):
        for process in (first, last):
            hear(process, "start")
        gone = ends_within(last, 60)
        assert gone == (-signal.SIGKILL if how == "kill" else 1)
        assert ends_within(first, PATIENCE_S) == ExitCode.PEER_LOST
    assert head_step(tmp_path) >= 1


@pytest.mark.parametrize("tidies_s", [1, 600])
def test_a_rank_that_is_told_to_stop_while_it_ends_for_a_lost_one_says_so(
    tmp_path: Path, ranks: Ranks, tidies_s: int
) -> None:
    with ranks("lose-raise", 2, interval=1, tidies_s=tidies_s) as (first, _):
        hear(first, "left")
        first.send_signal(signal.SIGTERM)
        assert ends_within(first, PATIENCE_S) == ExitCode.PEER_LOST


@pytest.mark.smoke
def test_of_more_ranks_than_one_tree_has_branches_all_hear_of_the_last(tmp_path: Path, ranks: Ranks) -> None:
    with ranks("lose-kill", 3, interval=10**6) as processes:
        assert ends_within(processes[-1], 60) == -signal.SIGKILL
        assert [ends_within(process, PATIENCE_S) for process in processes[:-1]] == [ExitCode.PEER_LOST] * 2


@pytest.mark.parametrize("case", ["late", "late-manager"])
def test_where_a_rank_is_long_in_coming_the_others_stop_together_soon_after_a_notice(
    tmp_path: Path, ranks: Ranks, case: str
) -> None:
    """Nothing is trained yet, so there is nothing to wait for until the grace period is over."""
    with ranks(case, 3, grace_s=600) as (first, second, _):
        for process in (first, second):
            hear(process, "waits")
        time.sleep(0.5)
        second.send_signal(signal.SIGTERM)
        assert [ends_within(process, PATIENCE_S) for process in (second, first)] == [ExitCode.SAVED] * 2
    words = [Termination.from_json((tmp_path / f"termination.{rank}").read_bytes()) for rank in range(2)]
    assert [(word.code, word.notice, word.step) for word in words] == [
        (75, "peer", None),
        (75, "sigterm", None),
    ]


def test_who_is_told_to_stop_at_the_start_ends_as_told_where_rank_0_goes_first(
    tmp_path: Path, ranks: Ranks
) -> None:
    """All are told, and rank 0, which has the ranks' store, is still building its model: it goes at once."""
    with ranks("late", 2, grace_s=600, late=0) as (first, second):
        hear(second, "waits")
        time.sleep(0.5)
        for process in (second, first):
            process.send_signal(signal.SIGTERM)
        assert ends_within(first, 60) == -signal.SIGTERM
        assert ends_within(second, PATIENCE_S) == ExitCode.SAVED
    word = Termination.from_json((tmp_path / "termination.1").read_bytes())
    assert (word.code, word.notice) == (75, "sigterm")


def test_a_rank_that_ends_without_closing_its_manager_is_not_lost(tmp_path: Path, ranks: Ranks) -> None:
    with ranks("unclosed", 2) as both:
        assert [ends_within(process, 60) for process in both] == [0, 0]
    assert head_step(tmp_path) == 3


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ranks_that_go_at_random_moments_leave_no_rank_behind(tmp_path: Path, ranks: Ranks) -> None:
    seed = int(os.environ.get("STEPKEEPER_SEED", secrets.randbelow(2**32)))
    print(f"STEPKEEPER_SEED={seed}")
    chance = random.Random(seed)
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ranks("lose-nothing", 2, folder, interval=chance.choice([1, 2, 10**6])) as both:
            for process in both:
                hear(process, "start")
            time.sleep(chance.uniform(0, 1.5))
            victim = chance.randrange(2)
            both[victim].send_signal(signal.SIGKILL)
            assert ends_within(both[1 - victim], PATIENCE_S) == ExitCode.PEER_LOST
