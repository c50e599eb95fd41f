"""Apply patches to copies of the packages."""

import os
import subprocess
from pathlib import Path
from typing import Final

__all__ = ["MUTATED", "PATCHES", "REPOSITORY", "THOROUGH", "apply_patch"]

PATCHES: Final = Path(__file__).parent
REPOSITORY: Final = PATCHES.parents[1]
MUTATED: Final = PATCHES / "mutated.py"
"""Runs pytest on a package in another folder."""

THOROUGH: Final = "--hypothesis-profile=thorough"
"""With fewer random cases a property may miss what a patch has changed."""


def apply_patch(patch: Path, folder: Path, *options: str) -> None:
    """Apply the patch to what is in the folder; with --check: see that it could be."""
    done = subprocess.run(
        ["git", "apply", *options, str(patch)],
        cwd=folder,
        # In a repository above, git would look for the files from its top.
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (
        f"{patch.name} no longer applies: rewrite it for the current code\n{done.stderr}"
    )
