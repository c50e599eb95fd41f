"""`make demo` shows what README says that it shows."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]


def test_the_demo_ends_as_claimed() -> None:
    """On a cluster of its own, which it starts and takes down, however it ends."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "demo"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = demo.communicate()
    finally:
        if demo.poll() is None:
            demo.send_signal(signal.SIGINT)
            demo.communicate()
    assert demo.returncode == 0, said[-8000:]
    assert "as claimed: resumed from the newest commit each time" in said
    assert (ROOT / "out" / "demo.svg").stat().st_size > 0
