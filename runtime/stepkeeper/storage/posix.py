"""Use a folder as a store: `link` is the put-if-absent, and nothing counts before files and folders are fsynced."""

import contextlib
import errno
import itertools
import operator
import os
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, final

from stepkeeper.errors import MissingObjectError, ObjectExistsError, StorageError, TransientStorageError
from stepkeeper.storage.base import Buffer, ObjectStat, check_path, holds
from stepkeeper.storage.posix_files import (
    NO_LINK,
    TEMPORARY,
    describe,
    make_folder_beside_deletions,
    read_range,
    refresh_folder,
    rename_no_replace,
    sync_above,
    sync_file_system,
    sync_folder,
    walk,
    write_all,
)

__all__ = ["PosixStore"]

_TRANSIENT: Final = frozenset({errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT})


@final
class PosixStore:
    """Store objects as files in a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        """The folder, absolute. It need not exist before the first write."""

        self._above_synced = False

    @property
    def uri(self) -> str:
        return self._root.as_uri()

    def put_if_absent(self, path: str, data: bytes) -> bool:
        target = self._root / check_path(path)
        temporary = target.with_name(f"{TEMPORARY}{target.name}-{secrets.token_hex(16)}")
        with self._converted_errors(target):
            self._write_new(temporary, [data])
            try:
                won = self._link(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        # The put may have been applied from here on: every failure is an unknown outcome, whatever its errno.
        with self._converted_errors(target, always=TransientStorageError):
            temporary.unlink(missing_ok=True)
            # Also if another put was first: the caller acts on that object next, so it must survive a power failure.
            self._sync_folders(target.parent)
        return won

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        target = self._root / check_path(path)
        with self._converted_errors(target):
            try:
                self._write_new(target, parts)
            except FileExistsError:
                self._check_same(target, parts)
            self._sync_folders(target.parent)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        target = self._root / check_path(path)
        with self._converted_errors(target):
            # An NFS client may have cached that the name doesn't exist: ask its server before the second look.
            for refreshed in (False, True):
                if refreshed:
                    refresh_folder(target.parent)
                with (
                    contextlib.suppress(FileNotFoundError, NotADirectoryError),
                    target.open("rb", buffering=0) as file,
                ):
                    return read_range(file.fileno(), offset, length)
            raise MissingObjectError(f"{target} does not exist")

    def read_pieces(self, path: str, offset: int, length: int, piece_bytes: int) -> Iterator[bytes]:
        target = self._root / check_path(path)
        with self._converted_errors(target), target.open("rb", buffering=0) as file:
            for place in range(offset, offset + length, piece_bytes):
                yield read_range(file.fileno(), place, min(piece_bytes, offset + length - place))

    def list(self, prefix: str) -> list[ObjectStat]:
        return list(self._listed(prefix, ""))

    def list_page(self, prefix: str, start: str, limit: int) -> Sequence[ObjectStat]:
        return list(itertools.islice(self._listed(prefix, start), limit))

    def _listed(self, prefix: str, start: str) -> Iterator[ObjectStat]:
        """Yield the objects with that prefix from `start` on, in order. Other files aren't accessed."""
        folder = prefix.rpartition("/")[0]
        with self._converted_errors(self._root / folder):
            refresh_folder(self._root / folder)
            found = walk(self._root / folder, f"{folder}/" if folder else "")
            chosen = [each for each in found if each[0] >= start and each[0].startswith(prefix)]
            for path, entry in sorted(chosen, key=operator.itemgetter(0)):
                stat = describe(path, entry)
                if stat is not None:
                    yield stat

    def delete(self, path: str) -> None:
        target = self._root / check_path(path)
        with self._converted_errors(target):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                target.unlink()
            # Remove the folders that are empty now, except for the root.
            for folder in self._folders(target.parent)[:-1]:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    break

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _folders(self, folder: Path) -> tuple[Path, ...]:
        """List `folder` and the folders above it, up to the root."""
        above = (folder, *folder.parents)
        return above[: above.index(self._root) + 1]

    def _write_new(self, target: Path, parts: Sequence[Buffer]) -> None:
        """Write a new file durably. Raises FileExistsError. Leaves no file if it fails."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            try:
                descriptor = os.open(target, flags, 0o644)
                break
            except FileNotFoundError:
                # The folder is new, or a deletion has just removed it because it was empty.
                make_folder_beside_deletions(target.parent)
        try:
            try:
                write_all(descriptor, parts)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _link(self, temporary: Path, target: Path) -> bool:
        """Give `temporary` the name `target`, and perhaps leave its old one. Returns False if that name was taken."""
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            # vfat, exFAT and many FUSE file systems have no hard links.
            return rename_no_replace(temporary, target)
        return True

    def _check_same(self, target: Path, parts: Sequence[Buffer]) -> None:
        """Check that an earlier try of the same write succeeded. Raises ObjectExistsError."""
        with target.open("rb", buffering=0) as file:
            same = holds(partial(read_range, file.fileno()), parts, os.fstat(file.fileno()).st_size)
            os.fsync(file.fileno())
        if not same:
            raise ObjectExistsError(f"{target} exists with other bytes; it was not overwritten")

    def _sync_folders(self, folder: Path) -> None:
        """Make the entries of every folder from `folder` to the root, and the root's own, survive a power failure."""
        for each in self._folders(folder):
            sync_folder(each)
        try:
            sync_folder(self._root.parent)
        except PermissionError:
            # Once is enough: the root can't disappear from it later.
            if not self._above_synced:
                sync_file_system(self._root)
        if not self._above_synced:
            sync_above(self._root.parent)
            self._above_synced = True

    @contextlib.contextmanager
    def _converted_errors(self, target: Path, always: type[StorageError] | None = None) -> Iterator[None]:
        """Convert OSErrors into StorageErrors that name `target`: into `always`, or into the class for their errno."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            kind = TransientStorageError if error.errno in _TRANSIENT else StorageError
            refused = error.filename
            where = f" ({refused})" if isinstance(refused, Path | str) and Path(refused) != target else ""
            raise (always or kind)(error.errno, f"{target}: {error.strerror or error}{where}") from error
