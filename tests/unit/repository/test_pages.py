"""Test that the links, commands and targets that the pages name are there."""

import re
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from stepkeeper.cli.app import app
from stepkeeper.contract import Identity

ROOT = Path(__file__).parents[3]
PAGES = [
    Path(name)
    for name in subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "*.md"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    if name and (ROOT / name).is_file()
]
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
