"""Write, sync, rename and list the files and folders of a store on a POSIX file system."""

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from stepkeeper.errors import StorageError, TransientStorageError
from stepkeeper.storage.base import Buffer, ObjectStat, flat_view
from stepkeeper.storage.direct import write_past_cache
from stepkeeper.storage.moved import moved

__all__ = [
    "NO_LINK",
    "TEMPORARY",
    "describe",
    "make_folder_beside_deletions",
    "read_range",
    "refresh_folder",
    "rename_no_replace",
    "sync_above",
    "sync_file_system",
    "sync_folder",
    "walk",
    "write_all",
]

NO_LINK: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
"""Errors of `link` where there are no hard links, or no more of them."""

TEMPORARY: Final = ".tmp-"
_SILLY_RENAMED: Final = ".nfs"
"""The prefix that an NFS client gives to a file that is deleted while a process reads it."""

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_AT_STATX_FORCE_SYNC: Final = 0x2000
_STATX_BASIC_STATS: Final = 0x7FF
_STATX_BYTES: Final = 256
_MAX_PARTS: Final = 512
"""The most buffers in one writev; IOV_MAX is 1024 on Linux."""

_TRIES: Final = 3
"""Deletions and other processes that create the folder again don't interfere more often than that."""


def make_folder_beside_deletions(folder: Path) -> None:
    """Create a folder while deletions may remove empty ones.

    Raises TransientStorageError if one did, StorageError if no folder can be created there, as in /proc.
    """
    for _ in range(_TRIES):
        try:
            make_folder(folder)
        except FileNotFoundError as error:
            above, refused = Path(error.filename or folder).parent, error
        else:
            return
        if not above.is_dir():
            raise TransientStorageError(
                f"{folder}: a deletion removed a folder above it, which was still empty"
            ) from refused
    # The folder above exists after each try.
    raise StorageError(
        refused.errno, f"{folder}: no folder can be created in {above}, although it exists"
    ) from refused


def make_folder(folder: Path) -> None:
    """Create the folder and those above it, durably if they are new."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_entry(folder)


def sync_above(folder: Path) -> None:
    """Make the entries of the folders above survive a power failure, up to the file system's root.

    The process that created them may have been killed before it synced them.
    """
    device = folder.stat().st_dev
    for each in folder.parents:
        if each.stat().st_dev != device:
            return
        try:
            sync_folder(each)
        except PermissionError:
            # A folder that this user may not even list was there before.
            return


def rename_no_replace(temporary: Path, target: Path) -> bool:
    """Rename `temporary` to `target`. Return False if that is taken. Raises StorageError if it can't be."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        number = errno.ENOSYS
    else:
        names = (os.fsencode(temporary), os.fsencode(target))
        if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE) == 0:
            return True
        number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    if number not in (errno.EINVAL, errno.ENOSYS, *NO_LINK):
        raise OSError(number, os.strerror(number))
    raise StorageError(
        number,
        f"{target.parent} can neither link files nor rename them without replacing ({os.strerror(number)}): the log "
        "can't be written so that only one of two writers wins; put the root on another file system",
    )


def sync_folder(folder: Path) -> None:
    """Make the folder's entries survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_entry(folder: Path) -> None:
    """Make the folder's own entry survive a power failure, or else the whole file system."""
    try:
        sync_folder(folder.parent)
    except PermissionError:
        sync_file_system(folder)


def sync_file_system(folder: Path) -> None:
    """Make everything on the folder's file system survive a power failure. It may take long."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(
                number, f"{os.strerror(number)} (of its file system, as {folder.parent} may not be read)"
            )
    finally:
        os.close(descriptor)


def refresh_folder(folder: Path) -> None:
    """Ask a network file system's server whether the folder has changed.

    An NFS client caches listings, and names that didn't exist, for a minute.
    """
    if (statx := _find_statx()) is not None:
        found = ctypes.create_string_buffer(_STATX_BYTES)
        # A missing folder has no cached listing.
        statx(_AT_FDCWD, os.fsencode(folder), _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, found)


@cache
def _find_statx() -> Callable[..., int] | None:
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), "statx", None)
    return found


def write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    """Write all bytes of `parts`, joined. Large data bypasses the page cache if the file allows it."""
    if write_past_cache(descriptor, parts):
        return
    waiting = [view for view in map(flat_view, parts) if view.nbytes]
    first = 0
    while first < len(waiting):
        written = os.writev(descriptor, waiting[first : first + _MAX_PARTS])
        moved.note(written)
        while first < len(waiting) and written >= waiting[first].nbytes:
            written -= waiting[first].nbytes
            first += 1
        if written:
            waiting[first] = waiting[first][written:]


def read_range(descriptor: int, offset: int, length: int | None) -> bytes:
    """Read `length` bytes from `offset` on, or up to the end of the file if it is nearer or `length` is None."""
    rest = os.fstat(descriptor).st_size - offset
    rest = max(rest if length is None else min(rest, length), 0)
    pieces: list[bytes] = []
    while rest:
        piece = os.pread(descriptor, rest, offset)
        if not piece:
            break
        pieces.append(piece)
        offset += len(piece)
        rest -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def walk(folder: Path, prefix: str, *, below: bool = False) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield all files below `folder`, with `prefix` before their paths. A folder that doesn't exist has none.

    Temporary files, and folders below that may not be read, are left out. `below` is True in the recursive calls.
    """
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        # Folders below that may not be read (a volume's lost+found) hold no objects; `folder` itself may.
        if below:
            return
        raise
    for entry in entries:
        if entry.name.startswith((TEMPORARY, _SILLY_RENAMED)):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from walk(Path(entry.path), f"{prefix}{entry.name}/", below=True)
        else:
            yield prefix + entry.name, entry


def describe(path: str, entry: os.DirEntry[str]) -> ObjectStat | None:
    """Return the stat of the object at `path`; None if it was deleted meanwhile."""
    try:
        stat = entry.stat()
    except FileNotFoundError:
        return None
    return ObjectStat(path=path, size_bytes=stat.st_size, time_unix_s=stat.st_mtime)
