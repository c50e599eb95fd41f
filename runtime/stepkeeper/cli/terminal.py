# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""Provide what all commands share: printing text and JSON, progress bars, exit codes."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from stepkeeper.errors import (
    BadUriError,
    FencedError,
    NotExclusiveError,
    RefusedError,
    StepkeeperError,
    StorageError,
)
from stepkeeper.quantities import size_text

__all__ = [
    "AsJson",
    "ExitCode",
    "Sequences",
    "command_exit_code",
    "print_message",
    "progress_bar",
    "show_document",
    "show_table",
]

FORMAT: Final = 1
"""Version of the JSON documents. It changes if a key is removed or changes its meaning, not if one is added."""

_UNLIMITED: Final = 10_000
"""Width in columns where no terminal limits it."""

Sequences = Annotated[
    list[int] | None,
    typer.Option(
        "--sequence", metavar="N", min=0, help="Select the commit with this sequence, on any branch."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


class ExitCode(IntEnum):
    """Exit codes of the commands."""

    FINE = 0
    FINDING = 1
    """The store answered, and something is wrong or isn't there: bad bytes, a broken log, no such commit."""

    USAGE = 2
    STORAGE = 3
    """The store doesn't answer, or refuses."""

    REFUSED = 4
    """The operation isn't safe now, and nothing was done."""


def command_exit_code(error: StepkeeperError) -> ExitCode:
    """Return the exit code of a command that ends with `error`."""
    match error:
        case BadUriError():
            return ExitCode.USAGE
        case NotExclusiveError():
            return ExitCode.FINDING
        case StorageError():
            return ExitCode.STORAGE
        case RefusedError() | FencedError():
            return ExitCode.REFUSED
        case _:
            return ExitCode.FINDING


def print_message(message: str) -> None:
    """Print one line on stderr, with control characters escaped: names from files may have some."""
    line = " ".join(message.split())
    typer.echo(f"stepkeeper: {''.join(map(_printable, line))}", err=True)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def show_document(uri: str, document: dict[str, Any]) -> None:
    """Print a JSON document on stdout: keys format and uri (the root's), and those of `document`."""
    whole = {"format": FORMAT, "uri": uri, **document}
    typer.echo(json.dumps(whole, indent=2))


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print the rows on stdout, cut at the terminal's width if there is one; print nothing without rows.

    The columns `right` are aligned right, and `optional` ones left out if every cell is "-".
    """
    if not rows:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown = [
        (column, cells)
        for column, cells in zip(columns, zip(*rows, strict=True), strict=True)
        if column not in optional or set(cells) != {"-"}
    ]
    for column, _ in shown:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for row in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else _UNLIMITED, highlight=False, markup=False)
    console.print(table)


class _SpeedColumn(ProgressColumn):
    """The speed, in the units that everything else is in."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{size_text(int(speed))}/s")


@contextmanager
def progress_bar(title: str, total_bytes: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, if that is a terminal.

    Yields rich's `Progress.update` of this bar: it takes `advance`, or `completed` and `total`, in bytes.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        _SpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield partial(progress.update, progress.add_task(title, total=total_bytes))
