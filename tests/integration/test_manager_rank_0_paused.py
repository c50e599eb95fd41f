"""Rank 0, whose process holds the ranks' store, stands still: the others heed SIGTERM within their time, wherever."""

import signal
import time
from pathlib import Path

import pytest
from rank_talk import hear
from waiting_ranks import GRACE_S, Ranks, all_end_in_time, head_step

from stepkeeper.contract import ExitCode, Termination

PHASES = ("train", "save", "wait", "restore_latest", "end")
LIKE_THESE = ("restore", "verify", "close")
GRACES: tuple[dict[str, int], ...] = ({"grace_s": GRACE_S}, {})


@pytest.mark.parametrize("grace", GRACES, ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("phase", "world_size"),
    [
        *((phase, 2) for phase in PHASES),
        ("train", 3),
        *(pytest.param(phase, 3, marks=pytest.mark.long) for phase in (*PHASES[1:], *LIKE_THESE)),
        *(pytest.param(phase, 2, marks=pytest.mark.long) for phase in LIKE_THESE),
    ],
)
def test_the_others_end_with_the_notice_while_rank_0_stands_still(
    tmp_path: Path, ranks: Ranks, phase: str, world_size: int, grace: dict[str, int]
) -> None:
    with ranks(f"still-{phase}", world_size, **grace) as (first, *others):
        hear(first, "paused")
        for process in others:
            hear(process, "step" if phase == "train" else "waits", 6)
        time.sleep(1)
        told_s = time.monotonic()
        for process in others:
            process.send_signal(signal.SIGTERM)
        codes = all_end_in_time(others, told_s, grace)
    assert set(codes) <= {ExitCode.SAVED, ExitCode.PEER_LOST}
    if grace:
        for rank in range(1, world_size):
            said = Termination.from_json((tmp_path / f"termination.{rank}").read_bytes())
            assert (said.code, said.notice) in {
                (ExitCode.SAVED, "sigterm"),
                (ExitCode.PEER_LOST, "sigterm"),
            }
    assert head_step(tmp_path) == 1
