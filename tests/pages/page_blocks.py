"""Read the fenced blocks of the pages: what a reader of the documentation would type, apply or run.

A fence names its language, and then nothing, the name of a file, or a mark:

- ```` ```python ````: runs in the page's interpreter, after the blocks before it.
- ```` ```bash ````: commands, one after the other, in the page's shell. A comment `# exit code 1` says that a command
  fails by design, `# until Ctrl-C` that it ends only so.
- ```` ```console ````: a command behind `$`, and what it prints.
- ```` ```yaml ````: a manifest that the API server takes. ```` ```json ````: a document.
- ```` ```python train.py ````: the content of a file, which the page's commands then use.
- ```` ```bash google-cloud ````: marked as not run here; page_marks.py says why.
- ```` ```text ````: a picture or a listing.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import override

ROOT: Final = Path(__file__).parents[2]
LANGUAGES: Final = frozenset({"python", "bash", "console", "yaml", "json", "text"})
_FENCE: Final = re.compile(r"^( *)```(.*)$")
_ON_A_CLUSTER: Final = re.compile(r"(?:^|[|;(] *|\$ )(?:kubectl|helm)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a shell, and what the page says of it."""

    text: str
    exit_code: int = 0
    endless: bool = False
    """It ends by Ctrl-C only."""
    prints: str | None = None
    """Its output as the page shows it."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page; behind its language stands a file's name, a mark, or nothing."""

    page: str
    line: int
    language: str
    word: str
    text: str

    @override
    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        return self.word if "." in self.word else None

    @property
    def mark(self) -> str | None:
        return self.word if self.word and "." not in self.word else None

    @property
    def is_shell(self) -> bool:
        return self.language in ("bash", "console")

    @property
    def asks_cluster(self) -> bool:
        return self.is_shell and self.mark is None and bool(_ON_A_CLUSTER.search(self.text))

    @property
    def commands(self) -> tuple[Command, ...]:
        return tuple(_shown(self.text) if self.language == "console" else _typed(self.text))


def tracked_files(*patterns: str) -> tuple[str, ...]:
    """Return the names of git's files that are there."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *patterns]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return tuple(name for name in names if name and (ROOT / name).is_file())


def page_names() -> tuple[str, ...]:
    """Return the pages whose blocks run: README, the documentation, the examples' own."""
    folders = ("README.md", "docs/user", "docs/operations", "docs/design", "examples")
    return tuple(name for name in tracked_files(*folders) if name.endswith(".md"))


def asks_cluster(page: str) -> bool:
    """Tell whether the page is for somebody who has a cluster: one of its commands asks it."""
    return any(block.asks_cluster for block in read_blocks(page))


def read_blocks(page: str) -> tuple[Block, ...]:
    """Return a page's blocks in order. Raises ValueError for a fence that is never closed."""
    blocks: list[Block] = []
    opened: tuple[int, str, str] | None = None
    lines: list[str] = []
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, lines = (number, fence[1], fence[2].strip()), []
        elif fence and not fence[2]:
            first, indent, info = opened
            language, _, word = info.partition(" ")
            text = "".join(each.removeprefix(indent) + "\n" for each in lines)
            blocks.append(Block(page, first, language, word.strip(), text))
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block is never closed")
    return tuple(blocks)


def _typed(text: str) -> Iterator[Command]:
    """Split what is typed into commands: each is as few lines as a shell takes for whole."""
    lines: list[str] = []
    for line in text.splitlines():
        lines.append(line)
        command = "\n".join(lines)
        parsed = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)
        if line.endswith("\\") or parsed.returncode:
            continue
        lines = []
        if command.strip() and not command.lstrip().startswith("#"):
            yield _command(command)
    if lines:
        raise ValueError(f"not a whole command: {lines}")


def _command(text: str, prints: str | None = None) -> Command:
    code = re.search(r"# .*\bexit code ([0-9]+)", text)
    return Command(text, int(code[1]) if code else 0, bool(re.search(r"# .*until Ctrl-C", text)), prints)


def _shown(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, prints = part.partition("\n")
        yield _command(command, prints)
