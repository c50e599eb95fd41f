"""The files of a checkpoint: in a folder on this machine, or wherever else somebody can read them."""

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from stepkeeper_planners.errors import SourceError
from stepkeeper_planners.formats.reporting import printable

__all__ = ["CheckpointFiles", "LocalFolder", "as_checkpoint_files", "open_source_file"]

_NO_SUCH_FILE: Final = {
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
    errno.EILSEQ,
}
"""What a system says of a name that is no file's. Anything else is no fault of the source."""


class CheckpointFiles(Protocol):
    """Where a checkpoint's files are."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def path(self) -> Path | None:
        """The folder, where they are on this machine: a result never replaces it."""

    @property
    def block_bytes(self) -> int:
        """How much is fetched at least, however little is read; it is kept for the next read."""

    def elements_at(self, name: str, offset_bytes: int) -> int | None:
        """The first byte of the elements of the chunk that begins there, where that is known without reading it."""

    def open(self, name: str) -> io.BufferedReader:
        """The file of that name, to be read at any place.

        Raises:
            FileNotFoundError: there is none.
        """


class LocalFolder:
    """A folder on this machine."""

    block_bytes = 1

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.path)

    def elements_at(self, name: str, offset_bytes: int) -> None:
        """Not known."""

    def open(self, name: str) -> io.BufferedReader:
        """The file of that name in it. A pipe, which might never be written to, or a device is none."""
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "it is a pipe or a device")
        except BaseException:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "rb")


def as_checkpoint_files(source: str | os.PathLike[str] | CheckpointFiles) -> CheckpointFiles:
    """The files themselves, or those of a folder on this machine."""
    return LocalFolder(Path(source)) if isinstance(source, str | os.PathLike) else source


@contextmanager
def open_source_file(
    files: CheckpointFiles, name: str, what: str, *, missing: str = "is missing; the checkpoint isn't whole"
) -> Iterator[io.BufferedReader]:
    """The file that `what`, a name in the source, should be in. `missing` is said where there is none.

    Raises:
        SourceError: there is no such file, or can't be one.
    """
    where = f"{what}: {printable(f'{files.name}/{name}')}"
    try:
        file = files.open(name)
    except ValueError as error:
        raise SourceError(f"{where} can't be the name of a file") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise SourceError(f"{where} {missing}") from error
        if error.errno not in _NO_SUCH_FILE:
            raise
        raise SourceError(f"{where} is no file: {error.strerror}") from error
    with file:
        yield file
