"""Planners on real torch_xla with 4 devices. Its devices are set before it is imported, so each script is a process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "planners_xla"


@pytest.mark.parametrize("name", ["moves", "changes"])
def test_script(run_on_devices: Callable[..., str], name: str) -> None:
    run_on_devices(SCRIPTS / f"{name}.py")


def test_priming(run_on_devices: Callable[..., str], max_isa: str) -> None:
    # Programs are compared before anything is compiled: a few kinds tell whether a CPU makes a difference.
    kinds = () if max_isa == "AVX2" else ("sgd-momentum", "adamw-amsgrad", "adafactor")
    run_on_devices(SCRIPTS / "priming.py", *kinds, max_isa=max_isa)


@pytest.mark.smoke
def test_placements_loaded_onto_others(run_on_devices: Callable[..., str], tmp_path: Path) -> None:
    run_on_devices(SCRIPTS / "matrix.py", "sample", tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_placement_loaded_onto_every_other(run_on_devices: Callable[..., str], tmp_path: Path) -> None:
    run_on_devices(SCRIPTS / "matrix.py", "all", tmp_path, timeout_s=840)


def test_a_restored_training_runs_the_programs_of_an_undisturbed_one(
    run_on_devices: Callable[..., str], tmp_path: Path
) -> None:
    run_on_devices(SCRIPTS / "resuming.py", tmp_path, "few")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("marks", "mesh"),
    [
        ("weights", "4"),
        ("weights and batch", "2x2"),
        ("one weight", "2x1x2"),
        ("everything", "2x2"),
        ("batch", "2x1x2"),
    ],
)
def test_it_does_so_for_every_optimizer_and_way_of_marking(
    run_on_devices: Callable[..., str], tmp_path: Path, mesh: str, marks: str
) -> None:
    """About 4 s of CPU time for each of 17 to 45 cases."""
    run_on_devices(SCRIPTS / "resuming.py", tmp_path, mesh, marks, timeout_s=1700)


def test_plain_tensors_never_load_torch_xla() -> None:
    code = (
        "import sys, torch\n"
        "from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner, adapters\n"
        "adapters.materialize([torch.ones(1)])\n"
        "assert 'torch_xla' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
