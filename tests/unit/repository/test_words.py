"""Test that messages, docstrings, comments and pages use the field's words."""

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OUT = re.compile(
    r"\b(?:tells?|told|telling|whoever|anew|mend(?:s|ed|ing)?|heed(?:s|ed|ing)?|deaf|bur(?:y|ies|ied)"
    r"|last\s+words?|(?:go|goes|going|went|gone)\s+on)\b",
    re.IGNORECASE,
)
"""Words that are out. Write show, report, ask, again, fix, handle, termination message, continue."""

CODE = ("operator/", "runtime/", "planners/", "examples/", "benchmarks/")
HISTORY = ("CHANGELOG.md", "docs/adr/")
TRACKED = subprocess.run(
    ["git", "-C", str(ROOT), "ls-files", "-z", "*.py", "*.md"], capture_output=True, text=True, check=True
).stdout.split("\0")
FILES = [
    name
    for name in TRACKED
    if (name.startswith(CODE) if name.endswith(".py") else name and not name.startswith(HISTORY))
    and (ROOT / name).is_file()
]
PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def read_prose(name: str) -> Iterator[tuple[int, str]]:
    """Yield the strings and comments of a module, or a whole page, each with the number of its first line."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        yield 1, text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in PROSE:
            yield token.start[0], token.string


@pytest.mark.parametrize("suffix", [".py", ".md"])
def test_no_word_that_is_out_is_used(suffix: str) -> None:
    names = [name for name in FILES if name.endswith(suffix)]
    assert len(names) > 30
    found = [
        f"{name}:{first + prose[: word.start()].count(chr(10))}: {word[0]}"
        for name in names
        for first, prose in read_prose(name)
        for word in OUT.finditer(prose)
    ]
    if found:
        pytest.fail("\n".join(found), pytrace=False)
