"""Planners on real torch_xla with 4 devices. Its devices are set before it is imported, so each script is a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "planners_xla"


@pytest.mark.parametrize("name", ["placements", "dcp_both_ways", "kinds", "priming", "moves", "staging"])
def test_script(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


def test_placements_loaded_onto_others(tmp_path: Path) -> None:
    run("matrix", "sample", tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_placement_loaded_onto_every_other(tmp_path: Path) -> None:
    run("matrix", "all", tmp_path, timeout_s=840)


def run(name: str, *arguments: object, timeout_s: float = 280) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{name}.py", *map(str, arguments)],
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_plain_tensors_never_load_torch_xla() -> None:
    code = (
        "import sys, torch\n"
        "from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner, adapters\n"
        "adapters.materialize({'t': torch.ones(1)})\n"
        "assert 'torch_xla' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
