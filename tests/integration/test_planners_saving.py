"""dcp.save with our planner on several real ranks: even files, and each difference between ranks named."""

from collections.abc import Callable
from pathlib import Path

RANK = Path(__file__).parent / "planners_gloo" / "saving.py"


def test_files_are_even_and_differences_raise_on_four_ranks(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(RANK, 4, "balanced,differing", tmp_path, "{}")


def test_three_ranks_with_writers_of_several_threads(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(RANK, 3, "balanced,losing,in_another_process", tmp_path, '{"thread_count": 2}')
