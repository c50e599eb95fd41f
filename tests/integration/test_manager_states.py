"""Ranks whose states differ: by mistake, as PerRank, where each gets its own back, or by their random numbers."""

import json
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path

import pytest

TRAINERS = Path(__file__).parent / "manager_trainer"
STATES = TRAINERS / "states.py"


def loaders(folder: Path, step: int, world_size: int) -> list[list[int]]:
    return [literal_eval((folder / f"at-{step}-{r}-of-{world_size}").read_text()) for r in range(world_size)]


@pytest.mark.timeout(900)
def test_each_rank_gets_its_own_back_and_another_world_size_its_part(
    launch: Callable[..., None], tmp_path: Path
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
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(STATES, 2, tmp_path, "differs")


@pytest.mark.timeout(600)
def test_each_rank_goes_on_with_its_own_and_a_further_one_with_what_all_had_alike(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    def drawn(first: int, last: int, world_size: int) -> list[list[tuple[float, float]]]:
        launch(TRAINERS / "random_ranks.py", world_size, tmp_path, first, last)
        paths = (tmp_path / f"{first}-{last}-{rank}-of-{world_size}" for rank in range(world_size))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    whole = drawn(1, 9, 2)
    assert whole[0] != whole[1]
    # The newest commit is of step 9; the one before is gone back to.
    again = drawn(9, 10, 2)
    assert [each[0] for each in again] == [each[8] for each in whole]
    more = drawn(11, 11, 3)
    assert len({python for ((python, _),) in more}) == 3, "each has data of its own"
    assert len({torch for ((_, torch),) in more}) == 1, "all drop out the same"
