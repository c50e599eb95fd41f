"""Saved and loaded by a process group that isn't all processes."""

from collections.abc import Callable
from pathlib import Path

import pytest

GROUPS = Path(__file__).parent / "planners_gloo" / "groups.py"


@pytest.mark.parametrize("scenario", ["dtensors", "per_rank"])
def test_ranks_are_those_of_the_group(launch: Callable[..., None], tmp_path: Path, scenario: str) -> None:
    launch(GROUPS, 3, tmp_path, scenario)
