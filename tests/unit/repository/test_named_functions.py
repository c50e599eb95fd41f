"""Test that the functions and commands exist that messages and pages name."""

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import typer

from stepkeeper.cli.app import app

ROOT = Path(__file__).parents[3]
PACKAGES = ("operator/stepkeeper_operator", "runtime/stepkeeper", "planners/stepkeeper_planners")

FUNCTION = re.compile(r"(?<![\w./-])(?:stepkeeper(?!\.dev\b)|CheckpointManager)(?:\.[A-Za-z]\w*)+")
COMMAND = re.compile(r"(?:^|`|[:;] )stepkeeper ([a-z-]+) (?:\{\}|--)")
"""A command to run: an option follows, or a value that the message puts in."""


def read_strings(path: Path) -> Iterator[str]:
    """Yield the texts in a Python file, with {} in place of each value that is put in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def read_texts() -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from ((path.relative_to(ROOT), text) for text in read_strings(path))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield page.relative_to(ROOT), page.read_text(encoding="utf-8")


def exists(name: str) -> bool:
    path = name if name.startswith("stepkeeper.") else f"stepkeeper.{name}"
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


def test_every_function_exists_that_a_message_or_a_page_names() -> None:
    named = {(str(path), name) for path, text in read_texts() for name in FUNCTION.findall(text)}
    assert len(named) > 50
    missing = sorted((path, name) for path, name in named if not exists(name))
    assert missing == []


def test_every_command_exists_that_a_message_names() -> None:
    known = typer.main.get_group(app).commands
    named = {(str(path), name) for path, text in read_texts() for name in COMMAND.findall(text)}
    assert len(named) > 5
    assert [each for each in sorted(named) if each[1] not in known] == []
