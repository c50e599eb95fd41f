"""Ranks whose states differ: by mistake, which no checkpoint comes of, or as PerRank, where each gets its own back."""

from ast import literal_eval
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

STATES = Path(__file__).parent / "manager_trainer" / "states.py"


def loaders(folder: Path, step: int, world_size: int) -> list[list[int]]:
    return [literal_eval((folder / f"at-{step}-{r}-of-{world_size}").read_text()) for r in range(world_size)]


@pytest.mark.timeout(900)
def test_each_rank_gets_its_own_back_and_another_world_size_its_part(
    launch: "Callable[..., None]", tmp_path: Path
) -> None:
    launch(STATES, 1, tmp_path, "train")
    launch(STATES, 2, tmp_path, "train")
    launch(STATES, 2, tmp_path, "train")
    launch(STATES, 1, tmp_path, "refused")
    launch(STATES, 1, tmp_path, "train")
    assert loaders(tmp_path, 0, 1) == [list(range(12))]
    assert loaders(tmp_path, 2, 2) == [[2, 4, 6, 8, 10], [3, 5, 7, 9, 11]]
    assert loaders(tmp_path, 4, 2) == [[6, 8, 10], [7, 9, 11]]
    assert loaders(tmp_path, 6, 1) == [[10, 11]]


@pytest.mark.smoke
def test_states_that_differ_are_refused_in_all_ranks_before_anything_is_written(
    launch: "Callable[..., None]", tmp_path: Path
) -> None:
    launch(STATES, 2, tmp_path, "differs")
