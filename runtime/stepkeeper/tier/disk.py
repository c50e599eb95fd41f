"""Keep copies of one root's objects in a folder on a local disk. None of them is durable.

At most two saves have copies there: the one that is being staged, and the last used one of the others.
"""

import errno
import hashlib
import mmap
import os
import re
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from stepkeeper.checkpoint.manifest import is_object_name
from stepkeeper.errors import MissingObjectError, StorageError
from stepkeeper.storage.base import Buffer, check_path
from stepkeeper.storage.direct import write_past_cache
from stepkeeper.storage.posix import PosixStore

__all__ = ["LocalTier", "TierPlace"]

_SAVE: Final = re.compile(r"[0-9]+/[0-9]+-[0-9a-f]{32}")
_TEMPORARY: Final = ".tmp-"
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9]+")
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_SPARED: Final = 20
"""A 20th of the file system is left free: other programs on the host need the disk too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlace:
    """The place where a process keeps its tier."""

    folder: str
    """A folder for all roots, jobs and processes of this host."""

    most_bytes: int | None = None
    """The most bytes of one process's objects of one root; None sets no limit."""


@final
class LocalTier:
    """Hold copies of a root's bulk objects under their paths. Many threads and processes may use it at once.

    Names in a root are never reused, since each save has its own nonce, so a copy is either right or corrupt.
    """

    def __init__(self, place: TierPlace, uri: str) -> None:
        """Prepare the copies of the root with this URI. Nothing is read or written yet."""
        self._place = place
        self._folder = Path(place.folder) / _name_of(uri)
        self._files = PosixStore(self._folder)
        self._is_ours = False
        """True once only this user can have written the folder's files."""

    def make_room(self, folder: str, rank: int, size_bytes: int) -> None:
        """Make room for the share of `rank` in the save in `folder`. At most one other save stays, the last used one.

        Raises OSError if there is no room, or the folder can't be used.
        """
        self._make_folder()
        others = [each for each in self._saves() if each != folder]
        for each in others[1:]:
            self.drop(each)
        if others and size_bytes > self._room_bytes(rank):
            self.drop(others[0])
        room_bytes = self._room_bytes(rank)
        if size_bytes > room_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{self._folder} has room for {max(room_bytes, 0)} bytes, {size_bytes} are needed",
            )

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Put a copy, without a guarantee of durability. Raises OSError; then there is no copy."""
        target = self._folder / check_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{_TEMPORARY}{target.name}-{secrets.token_hex(16)}")
        try:
            # Not fsynced: after a power cut, checksums detect an incomplete copy.
            with temporary.open("xb") as file:
                if not write_past_cache(file.fileno(), parts):
                    for part in parts:
                        file.write(part)
            temporary.replace(target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | None:
        """Read a range of a copy, unverified; None if there is no copy, or it can't be read."""
        if not self._may_be_read():
            return None
        try:
            return self._files.read(path, offset, length)
        except MissingObjectError:
            return None
        except StorageError:
            self.forget(path)
            return None

    def list_held(self, prefix: str) -> set[str]:
        """List the objects with this prefix that have copies."""
        if not self._may_be_read():
            return set()
        try:
            return {each.path for each in self._files.list(prefix)}
        except StorageError:
            return set()

    def map_copy(self, path: str) -> memoryview:
        """Map a whole copy that this process has put, unverified. Raises OSError."""
        with (self._folder / check_path(path)).open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            return memoryview(
                mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ) if size_bytes else b""
            )

    def forget(self, path: str) -> None:
        """Delete the copy of an object, if possible."""
        with suppress(StorageError):
            self._files.delete(path)

    def drop(self, folder: str) -> None:
        """Delete all copies of the save in `folder`, if possible, and leftovers of killed puts."""
        where = self._folder / folder
        with suppress(OSError):
            for file in list(where.iterdir()):
                if is_object_name(file.name) or file.name.startswith(_TEMPORARY):
                    file.unlink(missing_ok=True)
            where.rmdir()
            where.parent.rmdir()

    def mark_used(self, folder: str) -> None:
        """Mark the save in `folder` as used, so that others are dropped before it."""
        with suppress(OSError, StopIteration):
            os.utime(next((self._folder / folder).iterdir()))

    def _saves(self) -> list[str]:
        """List the folders of saves, the last used one first.

        The times are those of their files: a process that drops files changes the folder's own time.
        """
        found: list[tuple[int, str]] = []
        for path in (each for step in _entries(self._folder) for each in _entries(step)):
            name = f"{path.parent.name}/{path.name}"
            if _SAVE.fullmatch(name):
                found.append((max(map(_changed_nanos, _entries(path)), default=0), name))
        return [name for _, name in sorted(found, reverse=True)]

    def _room_bytes(self, rank: int) -> int:
        """Return how many more bytes `rank` may put. The limit `most_bytes` is for the objects of one rank."""
        disk = os.statvfs(self._folder)
        free_bytes = (disk.f_bavail - disk.f_blocks // _SPARED) * disk.f_frsize
        if self._place.most_bytes is None:
            return free_bytes
        own = f"__{rank}_"
        held = (each for each in self._files.list("") if each.path.rpartition("/")[2].startswith(own))
        return min(free_bytes, self._place.most_bytes - sum(each.size_bytes for each in held))

    def _make_folder(self) -> None:
        """Make the folder. Raises OSError if that fails, or if other users may write to it."""
        for folder, mode in ((self._folder.parent, 0o777), (self._folder, 0o700)):
            # Folders above are not made: if the disk isn't mounted, they would be on another one.
            folder.mkdir(mode, exist_ok=True)
        if not self._may_be_read():
            raise PermissionError(
                errno.EPERM,
                f"{self._folder} belongs to another user, or others may write to it; use another folder",
            )

    def _may_be_read(self) -> bool:
        """Return whether only this user can have written the files in the folder."""
        if not self._is_ours:
            with suppress(OSError):
                found = self._folder.lstat()
                self._is_ours = (
                    stat.S_ISDIR(found.st_mode)
                    and found.st_uid == os.geteuid()
                    and not found.st_mode & _OTHERS_MAY_WRITE
                )
        return self._is_ours


def _entries(folder: Path) -> list[Path]:
    """List the entries of a folder; an empty list if it is gone, or isn't a folder."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _changed_nanos(file: Path) -> int:
    """Return a file's modification time; 0 if it is gone."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _name_of(uri: str) -> str:
    """Make a folder's name for a root: the readable end of its URI, and a digest."""
    readable = _NOT_IN_NAMES.sub("-", uri).strip("-")[-40:].strip("-")
    return f"{readable}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"
