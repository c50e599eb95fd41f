"""Random number generators in several ranks, through a manager and a restart."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

TRAINERS = Path(__file__).parent / "manager_trainer"


@pytest.mark.timeout(600)
def test_each_rank_goes_on_with_its_own_and_a_further_one_with_what_all_had_alike(
    launch: "Callable[..., None]", tmp_path: Path
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
