"""A rank stands still, with no notice: the others leave once it is silent for longer than a collective may be."""

import time
from pathlib import Path

import pytest
from rank_talk import hear
from waiting_ranks import Ranks, ends_within, head_step

from stepkeeper.contract import ExitCode
from stepkeeper.log import Log
from stepkeeper.log.entries import VoidEntry
from stepkeeper.storage import open_store

TIMEOUT_S = 10.0
"""The process group's timeout, with which the training itself sets how long its ranks may be apart.

A rank that runs may get no processor for some seconds.
"""

PATIENCE_S = 120.0
"""For the limits of each of two meetings, what the end takes, and a busy machine; far from any limit of a default."""

PHASES = ("save", "wait", "restore_latest", "end")
LIKE_THESE = ("restore", "verify", "close")


@pytest.mark.parametrize(
    ("phase", "world_size", "still"),
    [
        ("train", 2, 0),
        ("train", 3, 0),
        *((phase, 2, 1) for phase in PHASES),
        ("save", 3, 2),
        ("vote", 2, 1),
        *(pytest.param(phase, 2, still, marks=pytest.mark.long) for phase in LIKE_THESE for still in (0, 1)),
        *(pytest.param(phase, 2, 0, marks=pytest.mark.long) for phase in PHASES),
    ],
)
def test_the_others_leave_a_rank_that_stands_still(
    tmp_path: Path, ranks: Ranks, phase: str, world_size: int, still: int
) -> None:
    with ranks(f"still-{phase}", world_size, still=still, timeout_s=TIMEOUT_S) as processes:
        hear(processes[still], "paused")
        began_s = time.monotonic()
        others = [process for process in processes if process is not processes[still]]
        codes = [ends_within(process, began_s + PATIENCE_S - time.monotonic()) for process in others]
    assert codes == [ExitCode.PEER_LOST] * (world_size - 1)
    assert head_step(tmp_path) == 1
    if phase == "vote":
        log = Log(open_store((tmp_path / "root").as_uri()))
        assert isinstance(log.entry(log.open().tail).body, VoidEntry)
