"""Use any store that fsspec has a file system for, once it is proven that only one of two creates of a name wins."""

import contextlib
import errno
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, final

import fsspec
from fsspec.spec import AbstractFileSystem

from stepkeeper.errors import (
    BadUriError,
    MissingObjectError,
    NoAccessError,
    ObjectExistsError,
    StorageError,
    TransientStorageError,
)
from stepkeeper.storage.base import Buffer, ObjectStat, check_path, holds, joined_size_bytes
from stepkeeper.storage.exclusive_create import make_refusal, prove_exclusive_create
from stepkeeper.storage.moved import moved
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["FsspecStore", "open_fsspec"]

_TRANSIENT: Final = frozenset(
    {errno.EIO, errno.EREMOTEIO, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT}
)
_TIMES: Final = ("LastModified", "last_modified", "mtime", "timeCreated", "created")
"""The names that file systems give to the time at which an object was last put."""

_LATEST_UNIX_S: Final = 1e11
"""A greater number isn't in seconds."""

_NO_CREDENTIALS: Final = frozenset({"NoCredentialsError", "PartialCredentialsError"})
"""The names of the S3 client's errors for missing credentials. Azure's client has one error for that and for a service
that gives none at the moment.
"""

_MISSING: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def open_fsspec(uri: str, *, unsafe_single_writer: bool) -> "FsspecStore":
    """Open the store at `uri`, without caches of listings. Files and variables of fsspec set its options.

    Raises BadUriError if there is no such file system, its package isn't installed, or it takes more than a
    URI; and StorageError if it contacts a host when opened, and gets no answer.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(uri, use_listings_cache=False, skip_instance_cache=True)
    except (ValueError, ImportError) as error:
        raise BadUriError(f"{uri!r}: fsspec has no file system for it: {error}") from error
    except OSError as error:
        raise StorageError(error.errno, f"{uri}: fsspec can't open it: {error}") from error
    except Exception as error:  # the file system's class may raise anything if it needs more than a URI
        scheme = uri.partition("://")[0]
        raise BadUriError(
            f"{uri!r}: fsspec can't open a {scheme}:// file system by this URI alone ({error!r}); "
            "write the path of a folder, 'gs://bucket/prefix' or 's3://bucket/prefix'"
        ) from error
    return FsspecStore(filesystem, root, uri=uri.rstrip("/"), unsafe_single_writer=unsafe_single_writer)


@final
class FsspecStore:
    """Store objects in an fsspec file system.

    The exclusive create is proven before the first put of the process; readers need no permission to write.
    """

    def __init__(
        self,
        filesystem: AbstractFileSystem,
        root: str,
        *,
        uri: str,
        unsafe_single_writer: bool = False,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        self._filesystem: Any = filesystem
        self._root = root.rstrip("/")
        self._uri = uri
        self._unsafe = unsafe_single_writer
        self._patience = patience
        self._proving = threading.Lock()
        self._proven = unsafe_single_writer

    @property
    def uri(self) -> str:
        return self._uri

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Put an object if there is none; see `Store`.

        Raises NotExclusiveError, and puts nothing, if two puts of one name could both win.
        """
        where = self._at(path)
        self._prove()
        with self._converted_errors(path):
            if not self._unsafe:
                return self._create(where, data)
            if self._filesystem.exists(where):
                return False
            self._pipe(where, data, "overwrite")
        return True

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        where = self._at(path)
        with self._converted_errors(path):
            if not self._create(where, b"".join(parts)):
                self._check_same(path, parts)
        moved.note(joined_size_bytes(parts))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        where = self._at(path)
        end = None if length is None else offset + length
        with self._converted_errors(path):
            try:
                data: bytes = self._filesystem.cat_file(where, start=offset or None, end=end)
            except _MISSING as error:
                raise MissingObjectError(f"{self._uri}/{path} does not exist") from error
            except Exception:
                # File systems raise different errors for a range after the end: the size decides.
                if offset < self._size_bytes(path):
                    raise
                return b""
        return data

    def list(self, prefix: str) -> list[ObjectStat]:
        folder = f"{self._root}/{prefix.rpartition('/')[0]}".rstrip("/")
        with self._converted_errors(prefix):
            self._filesystem.invalidate_cache()
            try:
                found: dict[str, dict[str, Any]] = self._filesystem.find(folder, detail=True)
            except _MISSING:
                return []
        # Some file systems name files as requested, some with or without a leading slash.
        above = len(self._root.strip("/"))
        stats = [
            ObjectStat(
                path=name.strip("/")[above:].lstrip("/"),
                size_bytes=int(info.get("size") or 0),
                time_unix_s=_read_time(info),
            )
            for name, info in found.items()
            if info.get("type") != "directory"
        ]
        return sorted((s for s in stats if s.path.startswith(prefix)), key=lambda stat: stat.path)

    def delete(self, path: str) -> None:
        where = self._at(path)
        with self._converted_errors(path), contextlib.suppress(*_MISSING):
            self._filesystem.rm_file(where)

    def close(self) -> None:
        """Do nothing: fsspec closes its connections itself."""

    def _at(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _create_once(self, path: str, data: bytes) -> bool:
        with self._converted_errors(path):
            return self._create(self._at(path), data)

    def _create(self, where: str, data: bytes) -> bool:
        try:
            self._pipe(where, data, "create")
        except FileExistsError:
            return False
        return True

    def _pipe(self, where: str, data: bytes, mode: str) -> None:
        try:
            self._filesystem.pipe_file(where, data, mode=mode)
        except FileNotFoundError:
            # A bucket has no folders to create, and makedirs would create a missing bucket.
            if self._filesystem.async_impl:
                raise
            self._filesystem.makedirs(where.rpartition("/")[0], exist_ok=True)
            self._filesystem.pipe_file(where, data, mode=mode)

    def _size_bytes(self, path: str) -> int:
        self._filesystem.invalidate_cache()
        try:
            return int(self._filesystem.info(self._at(path))["size"])
        except _MISSING as error:
            raise MissingObjectError(f"{self._uri}/{path} does not exist") from error

    def _check_same(self, path: str, parts: Sequence[Buffer]) -> None:
        """Check that an earlier try of the same write succeeded. Raises ObjectExistsError."""
        if not holds(partial(self.read, path), parts, self._size_bytes(path)):
            raise ObjectExistsError(f"{self._uri}/{path} exists with other bytes; it was not overwritten")

    def _prove(self) -> None:
        with self._proving:
            if self._proven:
                return
            filesystem = self._filesystem
            inherited = type(filesystem).pipe_file is AbstractFileSystem.pipe_file
            if inherited and not filesystem.async_impl:
                raise make_refusal(self._uri, "its create checks first and writes later")
            prove_exclusive_create(self, self._create_once, self._patience)
            self._proven = True

    @contextlib.contextmanager
    def _converted_errors(self, path: str) -> Iterator[None]:
        """Convert any error of a file system into a StorageError that names the object."""
        where = f"{self._uri}/{path}"
        try:
            yield
        except StorageError:
            raise
        except (TimeoutError, ConnectionError) as error:
            raise TransientStorageError(f"{where}: no answer: {error!r}") from error
        except _MISSING as error:
            raise NoAccessError(
                f"{where}: there is no such bucket or folder ({error}). Correct the URI, or create it"
            ) from error
        except PermissionError as error:
            raise NoAccessError(
                f"{where}: not allowed ({error}). Grant the permission to read, write, list and delete"
            ) from error
        except NotImplementedError as error:
            raise StorageError(
                f"{where}: fsspec's {type(self._filesystem).__name__} can't do that ({error!r}). A root needs a store "
                "that takes objects, such as gs://, s3:// or a folder"
            ) from error
        except OSError as error:
            kind = TransientStorageError if error.errno in _TRANSIENT else StorageError
            raise kind(error.errno, f"{where}: {error}") from error
        except Exception as error:  # a client's own error: the request may have been applied all the same
            if type(error).__name__ in _NO_CREDENTIALS:
                raise NoAccessError(
                    f"{where}: no valid credentials ({error}). {type(self._filesystem).__name__} of fsspec takes them "
                    "from the environment, or from its client's configuration file"
                ) from error
            raise TransientStorageError(f"{where}: {error!r}") from error


def _read_time(info: Mapping[str, Any]) -> float | None:
    """Read when an object was put, in seconds since 1970; None if its file system reports no usable time."""
    changed = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    if isinstance(changed, str):
        try:
            changed = datetime.fromisoformat(changed)
        except ValueError:
            return None
    if isinstance(changed, datetime):
        return (changed if changed.tzinfo else changed.replace(tzinfo=UTC)).timestamp()
    if isinstance(changed, int | float) and 0 <= changed < _LATEST_UNIX_S:
        return float(changed)
    return None
