"""No wait of the train thread outlasts a notice or the loss of a rank, as processes with real signals."""

import os
import random
import secrets
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rank_talk import GRACE_S, Ranks, all_end_in_time, hear, hear_rest

from stepkeeper.contract import ExitCode
from stepkeeper.log import Log
from stepkeeper.log.entries import VoidEntry
from stepkeeper.storage import open_store
from stepkeeper_testing.left_behind import head_of, last_word

PATIENCE_S = 60.0
"""The loss of a rank is heard of within a second. Saves in flight, Python's end and a busy machine take longer."""


@pytest.mark.parametrize(
    ("call", "knows"),
    [("step", True), ("step", False), *((call, True) for call in ("save", "wait", "restore", "end"))],
)
def test_a_call_that_waits_for_a_save_that_is_stuck_ends_with_the_notice(
    tmp_path: Path, ranks: Ranks, call: str, knows: bool
) -> None:
    grace = {"grace_s": GRACE_S} if knows else {}
    with ranks(f"wait-{call}", **grace) as (process,):
        companion = hear(process, "companion")["pid"]
        try:
            hear(process, "waits")
            time.sleep(0.5)
            told_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            (code,) = all_end_in_time([process], told_s, grace)
        finally:
            with suppress(ProcessLookupError):
                os.kill(companion, signal.SIGKILL)
    assert code == ExitCode.SAVED
    if grace:
        assert (last_word(tmp_path, 0).code, last_word(tmp_path, 0).notice) == (ExitCode.SAVED, "sigterm")
    assert head_of(tmp_path).step == 1


@pytest.mark.parametrize(("world_size", "told"), [(2, 0), (4, 3)])
def test_all_know_of_a_notice_while_they_are_in_a_c_call(
    ranks: Ranks, tmp_path: Path, world_size: int, told: int
) -> None:
    with ranks("stands", world_size, grace_s=120) as processes:
        for process in processes:
            hear(process, "stands")
        time.sleep(0.5)
        told_s = time.monotonic()
        processes[told].send_signal(signal.SIGTERM)
        known = [hear(process, "knows") for process in processes]
        (tmp_path / "go").touch()
        stops = [said["step"] for process in processes for said in hear_rest(process) if "step" in said]
    assert max(each["at_s"] for each in known) - told_s < 10.0, "a busy machine has others to run"
    assert [each["of"] for each in known] == ["sigterm" if n == told else "peer" for n in range(world_size)]
    assert [process.returncode for process in processes] == [ExitCode.SAVED] * world_size
    assert stops == [head_of(tmp_path).step] * world_size
    assert {last_word(tmp_path, rank).code for rank in range(world_size)} == {ExitCode.SAVED}


PHASES = ("save", "wait", "restore", "end")


@pytest.mark.parametrize(
    ("phase", "world_size", "still"),
    [
        *(("train", world_size, 0) for world_size in (2, 3)),
        *((phase, 2, 1) for phase in (*PHASES, "vote")),
        ("save", 3, 2),
        *(pytest.param(phase, 2, 0, marks=pytest.mark.long) for phase in PHASES),
    ],
)
def test_the_others_leave_a_rank_that_stands_still_for_longer_than_a_collective_may(
    tmp_path: Path, ranks: Ranks, phase: str, world_size: int, still: int
) -> None:
    # A rank that runs may get no processor for some seconds.
    with ranks(f"still-{phase}", world_size, still=still, timeout_s=10.0) as processes:
        hear(processes[still], "paused")
        others = [process for process in processes if process is not processes[still]]
        codes = [process.wait(2 * PATIENCE_S) for process in others]
    assert codes == [ExitCode.PEER_LOST] * (world_size - 1)
    assert head_of(tmp_path).step == 1
    if phase == "vote":
        log = Log(open_store((tmp_path / "root").as_uri()))
        assert isinstance(log.entry(log.open().tail).body, VoidEntry)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ranks_that_go_at_random_moments_leave_no_rank_behind(tmp_path: Path, ranks: Ranks) -> None:
    seed = int(os.environ.get("STEPKEEPER_SEED", secrets.randbelow(2**32)))
    print(f"STEPKEEPER_SEED={seed}")
    chance = random.Random(seed)
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ranks("lose", 2, folder, interval=chance.choice([1, 2, 10**6])) as both:
            for process in both:
                hear(process, "start")
            time.sleep(chance.uniform(0, 1.5))
            victim = chance.randrange(2)
            both[victim].send_signal(signal.SIGKILL)
            assert both[1 - victim].wait(PATIENCE_S) == ExitCode.PEER_LOST
