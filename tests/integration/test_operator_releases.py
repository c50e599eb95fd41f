"""Test that operators of this tree, a made-up later release and 0.1.0 take over from one another, without a cluster.

tests/e2e/test_upgrades.py does it on a cluster.
"""

import json
import os
import subprocess
import sys
import zipfile
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


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of release 0.1.0."""
    folder = tmp_path_factory.mktemp("first")
    (wheel,) = (TREE / "tests/data/releases/0.1.0").glob("*.whl")
    with zipfile.ZipFile(wheel) as packages:
        packages.extractall(folder)
    return folder


def play(tree: Path, file: Path, story: str, **spec: Any) -> dict[str, Any]:
    """Let the operator of a tree play the story. Return the job's status and the uids of its pods."""
    path = [tree, tree / "operator", tree / "runtime", TREE / "tests" / "fakes"]
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
    assert (first["status"]["nextScore"], first["status"]["restarts"]["nextRacks"]) == (5, 5)
    kept = play(TREE, file, f"{older}, {AT_ONCE}, attempts 2")
    assert kept["pods"] == first["pods"]
    starts = f"fail, run 10, {AT_ONCE}, attempts 3, {restart}, jobsets 2, attempts 4"
    down = play(TREE, file, f"{starts}, suspend, run, phase Suspended, pods 0, resume, run 20, attempts 5")
    assert (down["status"]["nextScore"], down["status"]["restarts"]["nextRacks"]) == (5, 5)
    up = play(later, file, f"{newer}, {AT_ONCE}, attempts 5")
    assert up["pods"] == down["pods"], "the newer operator takes over"


def test_nothing_that_a_user_asked_for_is_repeated_by_a_rollback_to_the_first_release_and_an_upgrade(
    first: Path, tmp_path: Path
) -> None:
    file, runs = tmp_path / "cluster.json", f"run 20, {AT_ONCE}"
    pending = "edit interval 50, run 2, condition PendingChanges True/AtNextStart"
    made = play(TREE, file, f"edit memory Gi, {runs}, ask 1, {runs}, jobsets 2, {pending}")
    assert play(first, file, f"{runs}, jobsets 2")["pods"] == made["pods"]
    unread = "edit ttl soon, run, condition Accepted False/UnreadableSpec"
    kept = play(TREE, file, f"{runs}, {unread}, jobsets 2")
    assert kept["pods"] == made["pods"]
    asked = play(TREE, file, f"ask 2, {runs}, jobsets 3, attempts 3")
    assert play(first, file, f"{runs}, jobsets 3")["pods"] == asked["pods"]
    up = play(TREE, file, f"{runs}, edit ttl later, {runs}, condition Accepted True/SpecAccepted, jobsets 3")
    assert up["pods"] == asked["pods"]
    assert play(first, file, f"{runs}, jobsets 3")["pods"] == asked["pods"]
