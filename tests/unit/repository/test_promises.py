"""Test that each promise to users, and each situation of a job, has its tests, and that one runs for every change."""

import ast
import re
from functools import cache

import pytest
from page_blocks import ROOT

ROW = re.compile(
    r"^\| (?P<promise>.+?) \| `(?P<first>tests/[^`]+)` \| `(?P<full>tests/[^`]+)` \|$", re.MULTILINE
)
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
ROWS = [match.groupdict() for match in ROW.finditer(PAGE)]
SITUATIONS = (ROOT / "docs" / "operations" / "situations.md").read_text(encoding="utf-8")
SITUATION = re.compile(r"^\| (.+?) \| .+ \| `(tests/[^`]+)` \|$", re.MULTILINE)


def marks_in(nodes: list[ast.expr]) -> frozenset[str]:
    """Return the names of the marks `pytest.mark.NAME` that stand there by themselves or are called."""
    found = [node.func if isinstance(node, ast.Call) else node for node in nodes]
    return frozenset(
        node.attr
        for node in found
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    )


@cache
def module_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def marks_of_module(path: str) -> frozenset[str]:
    for node in module_of(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return marks_in(node.value.elts if isinstance(node.value, ast.List) else [node.value])
    return frozenset()


def find(test: str) -> tuple[str, frozenset[str]] | None:
    """Return the folder below tests, and the marks, of a test that a row names; None if there is none."""
    path, *names = test.split("::")
    if not (ROOT / path).is_file():
        return None
    named = [node for node in module_of(path).body if getattr(node, "name", None) == names[0]]
    for name in names[1:] if named else ():
        methods = [node for node in getattr(named[0], "body", ()) if getattr(node, "name", None) == name]
        if not methods and not getattr(named[0], "bases", ()):
            return None
        named += methods
    if not named:
        return None
    decorators = [each for node in named for each in getattr(node, "decorator_list", ())]
    return path.split("/")[1], marks_of_module(path) | marks_in(decorators)


def runs_for_every_change(folder: str, marks: frozenset[str]) -> bool:
    return "long" not in marks and (folder in {"unit", "contract", "property", "e2e"} or "smoke" in marks)


def test_all_rows_are_read() -> None:
    assert len(ROWS) == sum(line.startswith("| ") and "tests/" in line for line in PAGE.splitlines())
    assert len(ROWS) >= 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["promise"][:60])
def test_a_promise_has_its_tests(row: dict[str, str]) -> None:
    first, full = find(row["first"]), find(row["full"])
    assert first is not None, f"no such test: {row['first']}"
    assert full is not None, f"no such test: {row['full']}"
    assert runs_for_every_change(*first), f"runs in `make test-all` only: {row['first']}"


@pytest.mark.parametrize(("situation", "test"), SITUATION.findall(SITUATIONS))
def test_a_situation_has_its_test(situation: str, test: str) -> None:
    found = find(test)
    assert found is not None, f"no such test: {test}"
    assert runs_for_every_change(*found), situation


def test_all_situations_are_read() -> None:
    rows = [line for line in SITUATIONS.splitlines() if line.startswith("| ")]
    headings = [line for line in rows if line.startswith(("| situation", "| ---"))]
    assert len(SITUATION.findall(SITUATIONS)) == len(rows) - len(headings)
