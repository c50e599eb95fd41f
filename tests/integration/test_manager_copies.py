"""Ranks whose copies of one tensor differ: what is saved is what one of them had, or nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "manager_trainer" / "copies.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_checkpoint_is_one_that_a_rank_had(
    launch: Callable[..., None], tmp_path: Path, world_size: int
) -> None:
    launch(SCRIPT, world_size, tmp_path, "cpu")


@pytest.mark.timeout(300)
def test_on_devices_too(launch_on_devices: Callable[..., None], tmp_path: Path) -> None:
    launch_on_devices(SCRIPT, 2, tmp_path, "xla")
