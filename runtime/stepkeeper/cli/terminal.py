"""The edges that all commands share: the root that is asked, what is said where, exit codes."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from stepkeeper.errors import (
    BadUriError,
    FencedError,
    NotExclusiveError,
    RefusedError,
    StepkeeperError,
    StorageError,
    UnknownOutcomeError,
)
from stepkeeper.log import Log
from stepkeeper.storage import Store, open_store
from stepkeeper.storage.retry import Patience

__all__ = [
    "AsJson",
    "ExitCode",
    "Root",
    "Sequences",
    "Url",
    "absolute_progress_bar",
    "command_exit_code",
    "is_interactive",
    "open_root",
    "print_message",
    "progress_bar",
    "show_document",
    "show_table",
]

FORMAT: Final = 1
"""Of the JSON documents: keys may be added, none goes or changes its meaning without another number."""

_UNLIMITED: Final = 10_000
"""Columns, where no terminal limits them."""

Url = Annotated[str, typer.Argument(metavar="URL", help="The root: file:///…, gs://bucket/prefix, …")]
Sequences = Annotated[
    list[int] | None, typer.Option("--sequence", metavar="N", min=0, help="By sequence, on any branch.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]


class ExitCode(IntEnum):
    FINE = 0
    FINDING = 1
    """Bad bytes, a broken log, no such commit: the store answered, and something is wrong or isn't there."""

    USAGE = 2
    STORAGE = 3
    """The store doesn't answer, or refuses."""

    REFUSED = 4
    """Not safe now; nothing was done."""


def command_exit_code(error: StepkeeperError) -> ExitCode:
    match error:
        case BadUriError():
            return ExitCode.USAGE
        case NotExclusiveError():
            return ExitCode.FINDING
        case StorageError() | UnknownOutcomeError():
            return ExitCode.STORAGE
        case RefusedError() | FencedError():
            return ExitCode.REFUSED
        case _:
            return ExitCode.FINDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    store: Store
    log: Log
    patience: Patience

    @property
    def uri(self) -> str:
        return self.store.uri.rstrip("/")


@contextmanager
def open_root(context: typer.Context, url: str) -> Iterator[Root]:
    """The root at `url`, its log not yet read. Raises BadUriError, StorageError."""
    patience: Patience = context.obj
    store = _store(url)
    try:
        yield Root(store=store, log=Log(store, patience=patience), patience=patience)
    finally:
        store.close()


def _store(url: str) -> Store:
    try:
        return open_store(url)
    except ImportError as error:
        raise BadUriError(
            f"{url!r}: its client isn't installed ({error}): pip install 'stepkeeper[gcs]'"
        ) from error
    except StepkeeperError:
        raise
    except Exception as error:  # a client's own, before there is a request: no credentials, for one
        raise StorageError(f"{url}: {error}") from error


def is_interactive() -> bool:
    """True where a question would be read, and can be answered."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def print_message(message: str) -> None:
    """One line on stderr. What a name from a file would do to the terminal, it doesn't."""
    line = " ".join(message.split())
    typer.echo(f"stepkeeper: {''.join(map(_printable, line))}", err=True)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def show_document(uri: str, document: dict[str, Any], *, line: bool = False) -> None:
    """The document is on stdout, one line of it or indented for people."""
    whole = {"format": FORMAT, "uri": uri, **document}
    typer.echo(json.dumps(whole, indent=None if line else 2))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """The rows are on stdout, cut at the terminal's width where there is one. Nothing where there are none."""
    if not rows:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else _UNLIMITED, highlight=False, markup=False)
    console.print(table)


@contextmanager
def progress_bar(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, and what moves it on by some bytes; nothing is seen where stderr is no terminal."""
    with _bar(title, total_bytes) as (progress, task):
        yield lambda n_bytes: progress.advance(task, n_bytes)


@contextmanager
def absolute_progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """As `progress_bar`, and what moves it to so many bytes of so many."""
    with _bar(title, None) as (progress, task):
        yield lambda done_bytes, total_bytes: progress.update(task, completed=done_bytes, total=total_bytes)


@contextmanager
def _bar(title: str, total_bytes: int | None) -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(title, total=total_bytes)
