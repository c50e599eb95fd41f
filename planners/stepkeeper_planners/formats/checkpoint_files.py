"""Open and map the files of a checkpoint: in a folder on this machine, or wherever a caller can read them."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from stepkeeper_planners.errors import SourceError, printable

__all__ = ["CheckpointFiles", "LocalFolder", "as_checkpoint_files", "open_source_file"]


class CheckpointFiles(Protocol):
    """Gives access to the files of a checkpoint that isn't in a folder on this machine."""

    @property
    def name(self) -> str:
        """The checkpoint's name, for messages."""

    @property
    def path(self) -> Path | None:
        """The folder, if the files are on this machine: a result never replaces it."""

    @property
    def block_bytes(self) -> int:
        """Fewest bytes that are fetched for any read. They are kept for the next read."""

    def elements_at(self, name: str, offset_bytes: int) -> int | None:
        """Return where the elements of a chunk begin in a file; None if that isn't known without reading it.

        Args:
            name: the file's name.
            offset_bytes: where the chunk begins in the file: before its elements there may be headers.
        """

    def open(self, name: str) -> io.BufferedReader:
        """Open a file for reading at any offset. Raises FileNotFoundError if there is none."""


class LocalFolder:
    """Opens the files of a checkpoint in a folder on this machine."""

    block_bytes = 1

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The folder's path."""
        return str(self.path)

    def elements_at(self, name: str, offset_bytes: int) -> None:
        """Return None: it isn't known."""

    def open(self, name: str) -> io.BufferedReader:
        """Open a file in the folder."""
        return (self.path / name).open("rb")


def as_checkpoint_files(source: str | os.PathLike[str] | CheckpointFiles) -> CheckpointFiles:
    """Return the source itself, or the files of a folder on this machine."""
    return LocalFolder(Path(source)) if isinstance(source, str | os.PathLike) else source


@contextmanager
def open_source_file(
    files: CheckpointFiles, name: str, what: str, *, missing: str = "is missing; the checkpoint is incomplete"
) -> Iterator[io.BufferedReader]:
    """Open a file of the source, which should hold `what`. Raises SourceError if there is none."""
    where = f"{what}: {printable(f'{files.name}/{name}')}"
    try:
        file = files.open(name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"{where} {missing}") from error
    except (IsADirectoryError, ValueError) as error:
        raise SourceError(f"{where} isn't a file: {error}") from error
    with file:
        yield file
