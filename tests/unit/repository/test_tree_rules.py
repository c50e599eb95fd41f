"""Rules about the tree that no linter knows."""

import ast
import re
import subprocess
from collections import Counter
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


PACKAGES = ("operator/stepkeeper_operator", "runtime/stepkeeper", "planners/stepkeeper_planners")
SOURCES = [
    path for path in FILES if path.suffix == ".py" and str(path.relative_to(ROOT)).startswith(PACKAGES)
]


def test_no_folder_of_a_package_holds_more_modules_than_a_reader_keeps_in_mind() -> None:
    n_modules = Counter(str(path.parent.relative_to(ROOT)) for path in SOURCES if path.name != "__init__.py")
    assert n_modules.keys() >= set(PACKAGES)
    assert {folder: n for folder, n in n_modules.items() if n > 16} == {}


def test_every_room_stands_on_the_map() -> None:
    """ARCHITECTURE.md has a line for each folder that lies directly in a package."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = {
        path.relative_to(ROOT / package).parts[0]
        for package in PACKAGES
        for path in SOURCES
        if path.is_relative_to(ROOT / package) and len(path.relative_to(ROOT / package).parts) > 1
    }
    assert len(rooms) > 20
    assert sorted(room for room in rooms if f"`{room}/`" not in page) == []


def test_docstrings_open_with_what_is_done_or_is_there() -> None:
    """A first word such as What or Who hides the actor. Verbs of functions are held by the linter (D401)."""
    hiding = re.compile(r"(?:What|Who|Whom|Whose|Of|As|That|Which|Whether|How|Where)\b")
    found = [
        f"{path.relative_to(ROOT)}: {first}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and hiding.match(first := (ast.get_docstring(node) or "").split("\n", 1)[0])
    ]
    assert found == []


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


def test_every_file_that_the_map_names_is_there() -> None:
    """ARCHITECTURE.md writes operator/ and planners/ for their packages; other paths are the runtime's."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", page)
    roots = {"operator": "operator/stepkeeper_operator", "planners": "planners/stepkeeper_planners"}
    paths = [
        f"{roots[first]}/{rest}"
        if (first := name.partition("/")[0]) in roots
        else f"runtime/stepkeeper/{name}"
        for name in named
        if (rest := name.partition("/")[2]) is not None
    ]
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("example", ["ddp", "fsdp2", "queued_resource", "text_lm"])
def test_an_examples_manifest_is_for_a_real_cluster(example: str) -> None:
    text = (ROOT / "examples" / example / "job.yaml").read_text(encoding="utf-8")
    assert [word for word in ("PJRT", "hostPath", "object-storage", "localhost") if word in text] == []
