"""`make demo` shows what README says that it shows."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]


def test_the_demo_ends_as_claimed() -> None:
    """On a cluster of its own, which it starts and takes down."""
    demo = subprocess.run(
        [sys.executable, "-m", "demo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert demo.returncode == 0, demo.stdout[-4000:] + demo.stderr[-4000:]
    assert "as claimed: resumed from the newest commit each time" in demo.stdout
    assert (ROOT / "out" / "demo.svg").stat().st_size > 0
