"""Test that what pages and messages name is there, and that each block of the pages says what it is."""

import ast
import json
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from page_blocks import LANGUAGES, ROOT, page_names, read_blocks, tracked_files
from page_marks import MARKS, STORIES
from typer.main import get_command

from stepkeeper.cli.app import app
from stepkeeper.contract import Identity

PAGES = [Path(name) for name in tracked_files("*.md")]
OPTIONS = {
    name: {option for parameter in command.params for option in parameter.opts} | {"--help"}
    for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]  # it is a group
}
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def headings(page: Path) -> set[str]:
    """Return the headings, as links name them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def code(page: Path) -> list[str]:
    """Lines of blocks, and what stands in a line as code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line for block in blocks for line in block.splitlines()] + inline


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def test_commands_have_the_options_that_pages_give_them() -> None:
    seen = set()
    for page in PAGES:
        ours = "" if page.name == "cli.md" else "stepkeeper "
        for line in code(page):
            found = re.match(rf"(?:\$ )?{ours}(?:stepkeeper )?(?:--patience \S+ )?([a-z]+)\b(.*)", line)
            if found and found[1] in OPTIONS:
                given = set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", re.split(r" [|#] ", found[2])[0]))
                assert given <= OPTIONS[found[1]], f"{page}: {line}"
                seen |= given
    assert len(seen) > 10


def test_make_has_the_targets_that_pages_name() -> None:
    named = {
        found[1] for page in PAGES for line in code(page) if (found := re.match(r"make ([a-z0-9-]+)", line))
    }
    assert len(named) > 5
    assert named <= TARGETS


def test_the_page_on_launching_names_each_variable_of_the_pods() -> None:
    text = (ROOT / "docs/user/launching.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## What the pods have in their environment")
    assert sorted(re.findall(r"`(STEPKEEPER_[A-Z_]+)`", section)) == sorted(Identity.variables())


BLOCKS = [block for page in page_names() for block in read_blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_block_names_its_language(page: Path) -> None:
    for block in read_blocks(str(page)):
        assert block.language in LANGUAGES, str(block)


def test_commands_for_a_cluster_run_on_one() -> None:
    tests = (ROOT / "tests/e2e/test_pages.py").read_text(encoding="utf-8")
    for page in {block.page for block in BLOCKS if block.asks_cluster}:
        assert f'"{page}"' in tests


def test_what_is_not_run_is_listed_with_its_reason() -> None:
    assert Counter(block.mark for block in BLOCKS if block.mark) == {
        mark: each.n_blocks for mark, each in MARKS.items()
    }
    assert all(each.reason for each in MARKS.values())
    for page, test in STORIES.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", page_names())
def test_blocks_are_whole_and_none_hides(page: str) -> None:
    text = re.sub(
        r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    assert not re.search(r"^\n {4,}(?!- |[0-9]+\. )\S", text, re.MULTILINE), "a block by its indent alone"
    blocks = read_blocks(page)
    run = "".join(block.text for block in blocks if block.language in ("bash", "console"))
    for block in blocks:
        assert block.language != "bash" or block.commands, str(block)
        assert not block.file or block.file in run, str(block)
        if block.language == "json":
            json.loads(block.text)
        if block.language == "text":
            command = r"^(?:\$ |(?:kubectl|helm|gcloud|stepkeeper|python|pip|make|import|from) )"
            assert not re.search(command, block.text, re.MULTILINE), str(block)


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


INTEGRATIONS = "stepkeeper.integrations."


def exists(name: str) -> bool:
    path = name if name.startswith("stepkeeper.") else f"stepkeeper.{name}"
    if path.startswith(INTEGRATIONS):
        # They import libraries that aren't here.
        module, _, own = path.removeprefix(INTEGRATIONS).partition(".")
        source = ROOT / "runtime/stepkeeper/integrations" / f"{module}.py"
        return source.is_file() and (not own or f'"{own}"' in source.read_text(encoding="utf-8"))
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
