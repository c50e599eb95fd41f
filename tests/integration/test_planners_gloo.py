"""A replicated model on several real ranks: saved once in total, by all of them, and read by any number."""

import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).parent / "planners_gloo" / "rank.py"
MODEL_BYTES = 12 * 2000 * 4


def run_ranks(action: str, world_size: int, folder: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, action, str(rank), str(world_size), folder],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(errors)[-4000:]


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_writes_its_share_and_any_number_reads(world_size: int, tmp_path: Path) -> None:
    run_ranks("save", world_size, tmp_path)
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoint").glob("*.distcp")]
    assert len(sizes) == world_size
    # Each blob has a frame of about 1.2 kB around its elements.
    assert MODEL_BYTES <= sum(sizes) < MODEL_BYTES + 15 * 2000
    assert max(sizes) - min(sizes) < 8000 + 3 * 2000
    run_ranks("load-ours", 2, tmp_path)
    run_ranks("load-stock", 1, tmp_path)
