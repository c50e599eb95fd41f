"""FSDP2, HSDP, FSDP over tensor parallelism and DDP by torch's state dict functions, from world to world."""

from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parent / "planners_ranks" / "state_dicts.py"


def test_models_and_optimizers_are_bit_equal_on_any_number_of_ranks(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(SCRIPT, 1, tmp_path, "first")
    launch(SCRIPT, 4, tmp_path, "second", "first")
    launch(SCRIPT, 3, tmp_path, "third", "second")
