"""Checkpoints of torch_xla's own planner, on real torch_xla with 4 devices."""

from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parent / "planners_xla" / "theirs_and_ours.py"


def test_torch_xla_and_we_read_one_another(run_on_devices: Callable[..., str], tmp_path: Path) -> None:
    run_on_devices(SCRIPT, tmp_path)
