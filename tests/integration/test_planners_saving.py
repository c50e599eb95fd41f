"""dcp.save with our planner on several real ranks: even files, small plans, and no word about what differs unsaid."""

import subprocess
import sys
from pathlib import Path

RANK = Path(__file__).parent / "planners_gloo" / "saving.py"


def run_ranks(ways: str, world_size: int, folder: Path, settings: str = "{}") -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, ways, str(rank), str(world_size), folder, settings],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(errors)[-4000:]


def test_files_are_even_and_differences_raise_on_four_ranks(tmp_path: Path) -> None:
    run_ranks("balanced,measured,differing,without_others,in_a_group", 4, tmp_path)


def test_three_ranks_with_writers_of_several_threads(tmp_path: Path) -> None:
    run_ranks("balanced,in_the_background,losing,in_another_process", 3, tmp_path, '{"thread_count": 2}')
