"""A replicated model on several real ranks: saved once in total, by all of them, and read by any number."""

from collections.abc import Callable
from pathlib import Path

import pytest

RANK = Path(__file__).parent / "planners_gloo" / "rank.py"
MODEL_BYTES = 12 * 2000 * 4


@pytest.mark.smoke
@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_writes_its_share_and_any_number_reads(
    world_size: int, launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(RANK, world_size, "save", tmp_path)
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoint").glob("*.distcp")]
    assert len(sizes) == world_size
    # Each tensor file has a frame of about 1.2 kB around its elements.
    assert MODEL_BYTES <= sum(sizes) < MODEL_BYTES + 15 * 2000
    assert max(sizes) - min(sizes) < 8000 + 3 * 2000
    launch(RANK, 2, "load-ours", tmp_path)
    launch(RANK, 1, "load-stock", tmp_path)
