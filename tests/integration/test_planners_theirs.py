"""Checkpoints of torch_xla's own planner, on real torch_xla with 4 devices."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "planners_xla" / "theirs_and_ours.py"


def test_torch_xla_and_we_read_one_another(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path],
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
