"""Test that a release and this tree resume each other's roots."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
RELEASES = sorted((TREE / "tests/data/releases").iterdir())
ROOTS = Path(__file__).parent / "releases" / "roots.py"


def resume(root: Path, newest: int, following: int, *library: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOTS, root.as_uri(), str(newest), str(following), library[0].parent],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, library))},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.smoke
@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_release_and_this_tree_resume_each_others_roots(release: Path, tmp_path: Path) -> None:
    installed = tmp_path / "release" / "site"
    zipfile.ZipFile(next(release.glob("*.whl"))).extractall(installed)
    tree = [TREE / "runtime", TREE / "planners"]
    root = tmp_path / "root"
    resume(root, 0, 3, installed)
    resume(root, 3, 5, *tree)
    resume(root, 5, 7, installed)
    resume(root, 7, 9, *tree)
