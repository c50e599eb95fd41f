"""CI sees generated files that differ from those in git, also those that git doesn't know yet."""

import os
import re
import subprocess
from pathlib import Path

import pytest

CI_RUN = Path(__file__).parents[3] / ".ci" / "run"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    clone = tmp_path / "clone"
    (clone / "charts").mkdir(parents=True)
    (clone / "charts/known.yaml").write_text("kind: Known\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run(["git", *identity, *command], cwd=clone, check=True)
    return clone


def check(clone: Path, generate: str) -> tuple[int, str]:
    """Run CI's check with a `make` that generates so."""
    make = clone.parent / "bin" / "make"
    make.parent.mkdir()
    make.write_text(f"#!/bin/sh\n{generate}\n")
    make.chmod(0o755)
    found = re.search(r"^unchanged\(\) \{\n.*?^\}\n", CI_RUN.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{found[0]}unchanged"],
        cwd=clone,
        env={**os.environ, "PATH": f"{make.parent}:{os.environ['PATH']}", "GIT_PAGER": "cat"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_what_is_as_in_git_passes(clone: Path) -> None:
    assert check(clone, "echo 'kind: Known' > charts/known.yaml") == (0, "")


@pytest.mark.parametrize("path", ["charts/known.yaml", "charts/crds/new.yaml"])
def test_what_is_not_as_in_git_is_named(clone: Path, path: str) -> None:
    code, said = check(clone, f"mkdir -p charts/crds; echo 'kind: Other' > {path}")
    assert code != 0
    assert path in said
