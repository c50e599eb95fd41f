"""Test that each block of the pages says what it is, and that nothing is left out of the tests that isn't listed."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from page_blocks import LANGUAGES, ROOT, page_names, read_blocks
from page_marks import MARKS, STORIES

BLOCKS = [block for page in page_names() for block in read_blocks(page)]
ALL_PAGES = subprocess.run(
    ["git", "-C", str(ROOT), "ls-files", "*.md"], capture_output=True, text=True, check=True
).stdout.split()


@pytest.mark.parametrize("page", [page for page in ALL_PAGES if (ROOT / page).is_file()])
def test_every_block_names_its_language(page: str) -> None:
    for block in read_blocks(page):
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
