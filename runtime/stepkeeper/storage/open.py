"""Open the store that a URI names."""

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from stepkeeper.errors import BadUriError
from stepkeeper.storage.base import Store
from stepkeeper.storage.mounts import BUCKET_NAME, gcsfuse_uri, read_mountinfo
from stepkeeper.storage.posix import PosixStore

__all__ = ["check_slashes", "expand_home", "open_store", "root_uri"]

_LOST_SLASH: Final = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


def check_slashes(path: str) -> None:
    """Check that `path` isn't a URI that pathlib has changed; it would be taken for a folder. Raises BadUriError."""
    if _LOST_SLASH.match(path):
        scheme, _, rest = path.partition(":")
        whole = f"{scheme}://{'/' if scheme == 'file' else ''}{rest.lstrip('/')}"
        raise BadUriError(f"{path!r}: pathlib removes a slash of a URI; pass {whole!r}, a str")


def expand_home(path: str) -> str:
    """Return `path` with a home folder in place of a leading '~' or '~user', as in a shell.

    Raises BadUriError without such a home: the path would be taken for a folder with that name.
    """
    expanded = os.path.expanduser(path)  # noqa: PTH111  # pathlib takes './~' for '~'
    if expanded.startswith("~"):
        raise BadUriError(
            f"{path!r}: there is no home folder for {path.partition('/')[0]!r}; write the whole path, or './{path}' "
            "for a folder of that name"
        )
    return expanded


def root_uri(path: str) -> str:
    """Return the URI of a root: a folder's path, which may begin with '~', as a file:// URI, and a URI unchanged.

    Raises BadUriError if the path is empty, a URI that pathlib has changed ("gs:/bucket"), or has no such home.
    """
    if not path:
        raise BadUriError("'' names no root: write a folder's path, or 'gs://bucket/prefix'")
    if "://" in path:
        return path
    check_slashes(path)
    return Path(expand_home(path)).absolute().as_uri()


def open_store(uri: str, *, unsafe_single_writer: bool = False) -> Store:
    """Open the store whose root is `uri`: file:///…, gs://…, or what fsspec knows. Nothing is read yet.

    `unsafe_single_writer` promises that nothing else will ever write there. Then fsspec's stores don't prove before
    the first put that only one of two creates of a name wins. Raises BadUriError, which shows a correct one.
    """
    parts = urlsplit(uri)
    if parts.query or parts.fragment:
        raise BadUriError(f"{uri!r}: '?' and '#' have no meaning in a checkpoint URI; leave them out")
    if (open_it := OPENERS.get(parts.scheme)) is not None:
        return open_it(uri, parts)
    match parts.scheme:
        case "":
            hint = Path(uri).absolute().as_uri() if uri else "file:///folder"
            raise BadUriError(
                f"{uri!r} has no scheme; for a folder write {hint!r}, for a bucket 'gs://bucket/prefix'"
            )
        case "local":
            raise BadUriError(f"{uri!r}: for a folder write 'file://' and its absolute path")
        case "memory":
            raise BadUriError(
                f"{uri!r} is in the memory of one process, and another process writes the checkpoints: nothing would "
                "be saved. In a test, use the path of a temporary folder"
            )
        case "gcs":
            raise BadUriError(f"{uri!r}: write 'gs://{parts.netloc}{parts.path}'")
        case _:
            return _open_fsspec(uri, parts, unsafe_single_writer=unsafe_single_writer)


def _open_file(uri: str, parts: SplitResult) -> PosixStore:
    if parts.netloc.startswith((".", "~")):
        raise BadUriError(f"{uri!r}: write '{parts.netloc}{parts.path}', without 'file://'")
    if parts.netloc not in ("", "localhost"):
        raise BadUriError(
            f"{uri!r} names a host ({parts.netloc!r}); for a folder write three slashes: 'file:///{parts.netloc}{parts.path}'"
        )
    # Names that aren't UTF-8 stand percent-encoded in a URI, byte by byte.
    path = Path(os.fsdecode(unquote_to_bytes(os.fsencode(parts.path))))
    if ".." in path.parts:
        # After a symbolic link, '..' leads up from the link's target, as in open().
        path = path.resolve()
    if not path.is_absolute() or path == Path("/"):
        raise BadUriError(f"{uri!r}: a folder's URI is 'file:///' and its absolute path")
    file = next((each for each in (path, *path.parents) if os.path.isfile(each)), None)  # noqa: PTH113  # False where permissions forbid a look
    if file is not None:
        raise BadUriError(f"{file} is a file; a root is a folder")
    bucket = gcsfuse_uri(read_mountinfo(), PurePosixPath(path.resolve()))
    if bucket is not None:
        raise BadUriError(
            f"{uri!r} is a bucket mounted by Cloud Storage FUSE, where a file may be lost after fsync, and two "
            f"writers of one name both win; write {bucket!r}, followed by the folder of the mount's option only-dir, "
            "if it has one"
        )
    return PosixStore(path)


def _open_gcs(uri: str, parts: SplitResult) -> Store:
    if not BUCKET_NAME.fullmatch(parts.netloc):
        raise BadUriError(f"{uri!r} names no bucket; write 'gs://bucket/prefix'")
    prefix = parts.path.strip("/")
    if "//" in prefix or any(segment in (".", "..") for segment in prefix.split("/")):
        raise BadUriError(
            f"{uri!r}: '//', '.' and '..' are names of objects in a bucket, not places; leave them out"
        )
    try:
        # The client library costs a second to import and is an extra.
        from stepkeeper.storage.gcs import GcsStore
    except ImportError as error:
        raise BadUriError(
            f"{uri!r}: its client isn't installed ({error}): pip install 'stepkeeper[gcs]'"
        ) from error
    return GcsStore(bucket=parts.netloc, prefix=prefix)


OPENERS: Final[dict[str, Callable[[str, SplitResult], Store]]] = {"file": _open_file, "gs": _open_gcs}
"""The functions that open URIs without fsspec, by scheme."""


def _open_fsspec(uri: str, parts: SplitResult, *, unsafe_single_writer: bool) -> Store:
    if "::" in uri:
        raise BadUriError(
            f"{uri!r}: '::' puts a cache or an archive before the store; write the store's own URI"
        )
    if parts.password is not None:
        raise BadUriError(
            f"a {parts.scheme}:// URI with a password in it would be written into logs; "
            "put the password into fsspec's configuration"
        )
    if not parts.netloc:
        raise BadUriError(f"{uri!r} names no bucket or host; write '{parts.scheme}://bucket/prefix'")
    if ".." in parts.path.split("/") or "//" in parts.path:
        raise BadUriError(f"{uri!r}: leave out '..' and '//'")
    try:
        # fsspec is an extra, as is the file system's own package.
        from stepkeeper.storage.fsspec import open_fsspec
    except ImportError as error:
        raise BadUriError(
            f"{uri!r}: for {parts.scheme}:// install stepkeeper[fsspec] and fsspec's package for it; "
            "file:// and gs:// need neither"
        ) from error
    return open_fsspec(uri, unsafe_single_writer=unsafe_single_writer)
