"""Roots that a release wrote are continued by this tree, and roots that this tree continued are restored by the release."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
RELEASES = sorted((TREE / "tests/data/releases").iterdir())
ROOTS = Path(__file__).parent / "releases" / "roots.py"


def run(command: str, root: Path, step: int, *library: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOTS, command, root.as_uri(), str(step), library[0].parent],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, library))},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_release_and_this_tree_continue_each_others_roots(release: Path, tmp_path: Path) -> None:
    installed = tmp_path / "release" / "site"
    zipfile.ZipFile(next(release.glob("*.whl"))).extractall(installed)
    tree = [TREE / "runtime", TREE / "planners"]
    root = tmp_path / "root"
    run("save", root, 3, installed)
    run("restore", root, 3, *tree)
    run("save", root, 5, *tree)
    run("restore", root, 5, installed)
    run("save", root, 7, installed)
    run("restore", root, 7, *tree)
