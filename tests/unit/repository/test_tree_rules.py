"""Rules about the tree that no linter knows."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    if name
]
FILES = [path for path in TRACKED if path.is_file()]


def test_the_operator_root_is_no_package() -> None:
    """With operator/__init__.py, Python started in the root finds it in place of its own operator module."""
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_no_folder_of_tests_is_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_modules_stay_readable_in_one_sitting() -> None:
    long = {
        str(path.relative_to(ROOT)): n_lines
        for path in FILES
        if path.suffix == ".py" and (n_lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert long == {}


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(
            r"(?:files\.pythonhosted|pypi|proxy\.golang|registry\.npmjs|deb\.debian)\.org",
            id="registry hosts",
        ),
        pytest.param(r"/(?:root|home/[a-z]+)/\.|/work/main|/tmp/brief", id="paths of one machine"),
    ],
)
def test_no_file_names(pattern: str) -> None:
    rule = re.compile(pattern)
    named = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in FILES
        if path != Path(__file__)
        and path.suffix not in {".png", ".sum"}
        and (match := rule.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    assert named == []


def test_both_locks_agree() -> None:
    """The operator's image gets the versions that the tests ran with."""

    def pins(name: str) -> set[str]:
        return set(re.findall(r"^[\w.-]+==[^ ]+", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))

    assert pins("requirements-operator.lock") <= pins("requirements.lock")
    assert not [pin for pin in pins("requirements-operator.lock") if pin.startswith("torch")]
