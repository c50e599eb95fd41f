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


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import stepkeeper

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = stepkeeper.no_such_name
