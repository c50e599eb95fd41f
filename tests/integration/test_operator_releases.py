"""Test that operators of this tree and of a made-up later release take over from one another, without a cluster.

tests/e2e/test_upgrades.py does it on a cluster, and with the releases.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from stepcluster.releases import change_tree

TREE: Final = Path(__file__).parents[2]
SCRIPT: Final = Path(__file__).parent / "releases" / "operators.py"
HOURLY: Final = {"checkpoint": {"uri": "gs://bucket/lm", "interval": {"hourly": {}}}}
DEFAULTS: Final = {"placement": {"hosts": {"count": 2, "nextSpread": 5}}}
PATIENT: Final = {"restarts": {"maxFailures": 9, "backoff": {"initialSeconds": 1}, "nextLimit": 5}}
AT_ONCE: Final = "phase Running, pods 2, rests"


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the release after this tree."""
    folder = tmp_path_factory.mktemp("later")
    change_tree(folder)
    return folder


def play(tree: Path, file: Path, story: str, **spec: Any) -> dict[str, Any]:
    """Let the operator of a tree play the story. Return the job's status and the uids of its pods."""
    path = [tree / "operator", tree / "runtime", TREE / "tests" / "fakes"]
    done = subprocess.run(
        [sys.executable, SCRIPT, file, json.dumps(spec), story],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("spec", "known"),
    [(DEFAULTS, "True/UnknownFields"), (HOURLY, "False/UnreadableSpec")],
    ids=["fields with defaults", "a choice"],
)
def test_a_job_runs_and_restarts_under_the_release_that_it_is_of_and_under_this_one(
    later: Path, tmp_path: Path, spec: dict[str, Any], known: str
) -> None:
    file, restart = tmp_path / "cluster.json", f"delete jobsets, run 20, {AT_ONCE}"
    newer, older = "run 20, condition Accepted True/SpecAccepted", f"run 20, condition Accepted {known}"
    first = play(later, file, f"{newer}, fail, run 10, {AT_ONCE}, attempts 2", **spec, **PATIENT)
    assert (first["status"]["nextScore"], first["status"]["resources"]["nextRacks"]) == (5, 5)
    kept = play(TREE, file, f"{older}, {AT_ONCE}, attempts 2")
    assert kept["pods"] == first["pods"]
    starts = f"fail, run 10, {AT_ONCE}, attempts 3, {restart}, jobsets 2, attempts 4"
    down = play(TREE, file, f"{starts}, suspend, run, phase Suspended, pods 0, resume, run 20, attempts 5")
    assert (down["status"]["nextScore"], down["status"]["resources"]["nextRacks"]) == (5, 5)
    up = play(later, file, f"{newer}, {AT_ONCE}, attempts 5")
    assert up["pods"] == down["pods"], "the newer operator takes over"
