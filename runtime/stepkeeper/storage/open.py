"""From a URI to a store."""

import re
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from stepkeeper.errors import BadUriError
from stepkeeper.storage.base import Store
from stepkeeper.storage.memory import MemoryStore, named_bucket
from stepkeeper.storage.posix import PosixStore

__all__ = ["open_store"]

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{1,220}[a-z0-9]")


def open_store(uri: str) -> Store:
    """A store whose root is `uri`: file:///…, gs://bucket/prefix or memory://name. Nothing is read or written yet.

    Raises BadUriError saying what to write instead.
    """
    parts = urlsplit(uri)
    if parts.query or parts.fragment:
        raise BadUriError(f"{uri!r}: '?' and '#' have no meaning in a checkpoint URI; leave them out")
    match parts.scheme:
        case "file":
            return _open_file(uri, parts)
        case "gs":
            return _open_gcs(uri, parts)
        case "memory":
            name = (parts.netloc + parts.path).rstrip("/")
            return MemoryStore(named_bucket(name), name=name)
        case "":
            hint = Path(uri).absolute().as_uri() if uri else "file:///folder"
            raise BadUriError(
                f"{uri!r} has no scheme; for a folder write {hint!r}, for a bucket 'gs://bucket/prefix'"
            )
        case "gcs":
            raise BadUriError(f"{uri!r}: write 'gs://{parts.netloc}{parts.path}'")
        case scheme:
            raise BadUriError(f"{uri!r}: no store for {scheme!r}; there are file://, gs:// and memory://")


def _open_file(uri: str, parts: SplitResult) -> PosixStore:
    if parts.netloc not in ("", "localhost"):
        raise BadUriError(
            f"{uri!r} names a host ({parts.netloc!r}); for a folder write three slashes: 'file:///{parts.netloc}{parts.path}'"
        )
    path = Path(unquote(parts.path))
    if not path.is_absolute() or ".." in path.parts or path == Path("/"):
        raise BadUriError(f"{uri!r}: a folder's URI is 'file:///' and its absolute path, without '..'")
    return PosixStore(path)


def _open_gcs(uri: str, parts: SplitResult) -> Store:
    if not _BUCKET.fullmatch(parts.netloc):
        raise BadUriError(f"{uri!r} names no bucket; write 'gs://bucket/prefix'")
    prefix = parts.path.strip("/")
    if "//" in prefix or any(segment in (".", "..") for segment in prefix.split("/")):
        raise BadUriError(
            f"{uri!r}: '//', '.' and '..' are names of objects in a bucket, not places; leave them out"
        )
    # The client library costs a second to import and is an extra.
    from stepkeeper.storage.gcs import GcsStore

    return GcsStore(bucket=parts.netloc, prefix=prefix)
