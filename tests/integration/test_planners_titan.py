"""Saved and loaded as torchtitan calls torch.distributed.checkpoint, with two pipeline stages and without."""

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "planners_ranks" / "titan.py"


@pytest.mark.smoke
def test_stages_that_know_their_own_layers_only_are_saved_and_joined(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(SCRIPT, 4, tmp_path, 2, "save:a", "load:a", "async_save:by_stepkeeper", "load:by_stepkeeper")
    launch(SCRIPT, 2, tmp_path, 1, "load:by_stepkeeper")
