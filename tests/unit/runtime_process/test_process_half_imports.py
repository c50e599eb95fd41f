"""Test the cost of starting: neither the package's import nor the companion process loads torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "statement",
    [
        "import stepkeeper; dir(stepkeeper); stepkeeper.StepkeeperError",
        "import stepkeeper.companion.server",
    ],
)
def test_no_torch_is_loaded(statement: str) -> None:
    check = (
        "import sys; sys.exit(str([m for m in ('torch', 'numpy', 'google.cloud') if m in sys.modules] or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; {check}"], stderr=subprocess.PIPE, check=False
    )
    assert done.stderr.strip() in (b"", b"''"), done.stderr
