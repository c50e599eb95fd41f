"""Keep one root's copies in a folder on a local disk. Nothing in it is durable, and nobody may depend on it."""

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
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9]+")
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_SPARED: Final = 20
"""The part of the file system that is left free, as a divisor: what else is on the host needs its disk too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlace:
    """The place where a process keeps its tier."""

    folder: str
    """A folder for any number of roots, jobs and processes of this host."""

    most_bytes: int | None = None
    """The most bytes of one process's objects of one root. None: as much as the disk has."""


@final
class LocalTier:
    """Hold copies of a root's bulk objects under their paths. Many threads and processes may use it at once.

    Names never come back in a root (each save has a nonce of its own), so a copy is of its object, or bad.
    """

    def __init__(self, place: TierPlace, uri: str) -> None:
        """Keep copies of the root with this URI; those of other roots are elsewhere.

        Nothing is read or written yet.
        """
        self._place = place
        self._folder = Path(place.folder) / _name_of(uri)
        self._files = PosixStore(self._folder)
        self._is_ours = False

    def make_room(self, folder: str, rank: int, size_bytes: int) -> None:
        """Make room for the share of `rank` in the save in `folder`. Of other saves at most the last used one stays.

        Raises OSError if there is no room, or the disk is no place for it.
        """
        self._make_folder()
        others = [each for each in self._saves() if each != folder]
        for each in others[1:]:
            self.drop(each)
        for each in others[:1]:
            if size_bytes > self._room_bytes(rank):
                self.drop(each)
        room_bytes = self._room_bytes(rank)
        if size_bytes > room_bytes:
            raise OSError(
                errno.ENOSPC, f"{self._folder} has room for {max(room_bytes, 0)} bytes, not for {size_bytes}"
            )

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Put a whole copy, as far as this process can tell. Raises OSError; then there is none."""
        target = self._folder / check_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{_TEMPORARY}{target.name}-{secrets.token_hex(16)}")
        try:
            # Not fsynced: after a power cut checksums tell whether it is whole.
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
        """Read that range of a copy, to be verified; None if there is no copy, or it can't be read."""
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
        """List the objects with this prefix that there are copies of."""
        if not self._may_be_read():
            return set()
        try:
            return {each.path for each in self._files.list(prefix)}
        except StorageError:
            return set()

    def map_copy(self, path: str) -> memoryview:
        """Map all of a copy that this process has put, to be verified. Raises OSError."""
        with (self._folder / check_path(path)).open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            return memoryview(
                mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ) if size_bytes else b""
            )

    def forget(self, path: str) -> None:
        """Delete the copy of that object, if possible."""
        with suppress(StorageError):
            self._files.delete(path)

    def drop(self, folder: str) -> None:
        """Delete all copies of the save in `folder`, if possible, and what killed puts have left there."""
        where = self._folder / folder
        with suppress(OSError):
            for file in list(where.iterdir()):
                if is_object_name(file.name) or file.name.startswith(_TEMPORARY):
                    file.unlink(missing_ok=True)
            where.rmdir()
            where.parent.rmdir()

    def mark_used(self, folder: str) -> None:
        """Mark the save in `folder` as used: others are dropped before it."""
        with suppress(OSError, StopIteration):
            os.utime(next((self._folder / folder).iterdir()))

    def _saves(self) -> list[str]:
        """List the folders of saves, the last used one first.

        Their files tell the time: a process that is dropping files changes the folder, which would be the
        newest then.
        """
        found: list[tuple[int, str]] = []
        for path in (each for step in _entries(self._folder) for each in _entries(step)):
            name = f"{path.parent.name}/{path.name}"
            if _SAVE.fullmatch(name):
                found.append((max(map(_changed_nanos, _entries(path)), default=0), name))
        return [name for _, name in sorted(found, reverse=True)]

    def _room_bytes(self, rank: int) -> int:
        disk = os.statvfs(self._folder)
        free_bytes = (disk.f_bavail - disk.f_blocks // _SPARED) * disk.f_frsize
        if self._place.most_bytes is None:
            return free_bytes
        own = f"__{rank}_"
        held = (each for each in self._files.list("") if each.path.rpartition("/")[2].startswith(own))
        return min(free_bytes, self._place.most_bytes - sum(each.size_bytes for each in held))

    def _make_folder(self) -> None:
        """Make the folder. Raises OSError if it can't be made, or isn't this user's alone."""
        for folder, mode in ((self._folder.parent, 0o777), (self._folder, 0o700)):
            # Folders above are not made: if the disk isn't mounted, they would be made on another one.
            folder.mkdir(mode, exist_ok=True)
        if not self._may_be_read():
            raise PermissionError(
                errno.EPERM,
                f"{self._folder} is another user's, or others may write to it; take another folder",
            )

    def _may_be_read(self) -> bool:
        """Tell whether nobody else can have put there what this process would take for its own."""
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
    """List what is in a folder; nothing if it is gone, or is no folder."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _changed_nanos(file: Path) -> int:
    """Return when a file was changed; 0 if it is gone."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _name_of(uri: str) -> str:
    """Make a folder's name for a root: the end of its URI for people, and a digest."""
    readable = _NO_NAME.sub("-", uri).strip("-")[-40:].strip("-")
    return f"{readable}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"
