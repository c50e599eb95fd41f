"""What starts often loads nothing heavy: the torch-free half, and an operator without QueuedResources."""

import subprocess
import sys

import pytest

LIBRARY = (
    "stepkeeper",
    "stepkeeper.contract",
    "stepkeeper.errors",
    "stepkeeper.companion.server",
    "stepkeeper.storage",
    "stepkeeper.log",
    "stepkeeper.checkpoint",
    "stepkeeper.retention.garbage",
    "stepkeeper.dcp",
    "stepkeeper.dcp.folder",
    "stepkeeper.checkpoint.dcp_format.metadata",
    "stepkeeper_planners.flat_names",
    "stepkeeper_planners.geometry.overlapping_pair",
    "stepkeeper.cli",
    "stepkeeper.cli.app",
)
HEAVY = ("torch", "numpy", "google.cloud", "google.auth", "requests", "pytest")
OPERATOR = (
    "stepkeeper_operator.startup",
    "stepkeeper_operator.cloud_tpu.cloud",
    "stepkeeper_operator.cloud_tpu.polling",
)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        pytest.param(LIBRARY, HEAVY, id="library"),
        pytest.param(OPERATOR, ("grpc", "google.cloud.tpu"), id="operator"),
    ],
)
def test_importing_loads_nothing_heavy(modules: tuple[str, ...], heavy: tuple[str, ...]) -> None:
    code = f"import sys, {', '.join(modules)}; print([m for m in sys.modules if m.startswith({heavy!r})])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "[]"
