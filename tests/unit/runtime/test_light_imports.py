"""The torch-free half stays torch-free, and a folder needs no client library."""

import subprocess
import sys

MODULES = (
    "stepkeeper.storage",
    "stepkeeper.log",
    "stepkeeper.checkpoint",
    "stepkeeper.retention.garbage",
    "stepkeeper.dcp",
    "stepkeeper.dcp.folder",
    "stepkeeper.checkpoint.dcp_format.metadata",
    "stepkeeper.companion",
    "stepkeeper_planners.geometry.overlapping_pair",
    "stepkeeper.cli",
    "stepkeeper.cli.app",
)
HEAVY = ("torch", "numpy", "google.cloud", "google.auth", "requests", "pytest")


def test_importing_loads_nothing_heavy() -> None:
    code = f"import sys, {', '.join(MODULES)}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "[]"
