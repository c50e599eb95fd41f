"""A torch.save file loaded into a distributed job: one rank reads, all get their parts."""

from collections.abc import Callable
from pathlib import Path
from runpy import run_path

import pytest
import torch

RANK = Path(__file__).parent / "formats_ranks" / "rank.py"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("what", "world_size"),
    [
        ("ours", 3),
        ("stock-planner", 2),
        ("refused", 2),
    ],
)
def test_one_rank_reads_for_all(
    what: str, world_size: int, launch: Callable[..., None], tmp_path: Path
) -> None:
    torch.save(run_path(str(RANK))["make_state"](7), tmp_path / "state.pt")
    (tmp_path / "damaged.pt").write_bytes((tmp_path / "state.pt").read_bytes()[:3000])
    launch(RANK, world_size, what, tmp_path)
