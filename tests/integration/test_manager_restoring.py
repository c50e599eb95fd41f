"""Ranks that restore together: if one of them can't, none is changed, and all say why."""

from collections.abc import Callable
from pathlib import Path

import pytest

RESTORING = Path(__file__).parent / "manager_trainer" / "restoring.py"


@pytest.mark.parametrize("scenario", ["one_does_not_fit", "one_cannot_ask"])
def test_all_ranks_or_none(launch: Callable[..., None], tmp_path: Path, scenario: str) -> None:
    launch(RESTORING, 2, tmp_path, scenario)
