"""Write a file or folder under a temporary name, and rename it when it is complete and durable."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from stepkeeper_planners.errors import DestinationExistsError

__all__ = ["new_file", "new_folder"]

_MOST_KEPT: Final = 200
"""Most bytes of a name that are kept in the temporary names beside it."""


@contextmanager
def new_file(dst: Path, *, source: Path | None, overwrite: bool) -> Iterator[BinaryIO]:
    """Open a file under a temporary name, and make it durable and name it `dst` if the block ends without error.

    Raises DestinationExistsError if `dst` is a folder, exists and `overwrite` is False, or is part of the source.
    """
    _check_file(dst, source=source, overwrite=overwrite)
    partial = _beside(dst, "partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # Something may have been made there meanwhile.
        _check_file(dst, source=source, overwrite=overwrite)
        partial.replace(dst)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(dst.parent)


@contextmanager
def new_folder(
    dst: Path, *, source: Path | None, overwrite: bool, replaceable: Callable[[Path], bool]
) -> Iterator[Path]:
    """Make a folder under a temporary name, and make it durable and name it `dst` if the block ends without error.

    With `overwrite`, a folder is replaced only if all its files are `replaceable` and the source is not in
    it. For a moment `dst` doesn't exist then: the old folder is beside it, as ".name.….replaced", until the
    new one has its name. Raises DestinationExistsError if `dst` exists and isn't replaced.
    """
    _check_folder(dst, source=source, overwrite=overwrite, replaceable=replaceable)
    partial = _beside(dst, "partial")
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            _sync(path)
        _sync_folder(partial)
        _check_folder(dst, source=source, overwrite=overwrite, replaceable=replaceable)
        _rename_folder(partial, dst)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync_folder(dst.parent)


def _beside(dst: Path, kind: str) -> Path:
    # A long name would be too long with the suffix.
    name = os.fsdecode(os.fsencode(dst.name)[:_MOST_KEPT])
    return dst.with_name(f".{name}.{secrets.token_hex(4)}.{kind}")


def _check_file(dst: Path, *, source: Path | None, overwrite: bool) -> None:
    if dst.is_dir():
        raise DestinationExistsError(f"{dst} is a folder; name a file")
    if os.path.lexists(dst) and not overwrite:
        raise DestinationExistsError(f"{dst} exists; delete it, or pass overwrite=True")
    if source is not None and os.path.lexists(dst) and _is_within(dst, source):
        raise DestinationExistsError(f"{dst} is part of {source}, which is the source; name another file")


def _check_folder(
    dst: Path, *, source: Path | None, overwrite: bool, replaceable: Callable[[Path], bool]
) -> None:
    if not os.path.lexists(dst) or (not dst.is_symlink() and dst.is_dir() and not any(dst.iterdir())):
        return
    if not overwrite:
        raise DestinationExistsError(f"{dst} exists; delete it, or pass overwrite=True")
    if dst.is_symlink() or not dst.is_dir() or not _holds_only(dst, replaceable):
        raise DestinationExistsError(
            f"{dst} isn't something that this conversion writes, so overwrite=True doesn't replace it; delete it "
            "yourself"
        )
    if source is not None and _is_within(source, dst):
        raise DestinationExistsError(f"{source}, which is the source, is in {dst}; name another folder")


def _holds_only(folder: Path, replaceable: Callable[[Path], bool]) -> bool:
    return all(path.is_file() and replaceable(path) for path in folder.iterdir())


def _is_within(path: Path, other: Path) -> bool:
    """Return whether the path is the other one or below it, with links resolved."""
    return path.resolve().is_relative_to(other.resolve())


def _rename_folder(partial: Path, dst: Path) -> None:
    """Give the folder the name `dst`, and delete one that had it. If that fails, the old one has it again."""
    if not dst.exists() or not any(dst.iterdir()):
        partial.rename(dst)
        return
    old = _beside(dst, "replaced")
    dst.rename(old)
    try:
        partial.rename(dst)
    except BaseException:
        old.rename(dst)
        raise
    _sync_folder(dst.parent)
    shutil.rmtree(old)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
