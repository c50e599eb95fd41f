# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""Open the folder of a checkpoint, at any path or URI."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Self, final

from stepkeeper.errors import BadUriError
from stepkeeper.storage import ObjectStat, Store, open_store, root_uri
from stepkeeper.storage.base import Buffer, StreamedStore

__all__ = ["Located", "Location", "folder_uri", "open_folder"]

Location = str | os.PathLike[str]
"""A folder on this machine by its path, or any folder by its URI."""


def folder_uri(location: Location) -> str:
    """Return the folder's URI. A path may be relative, as for torch's own writers. Raises BadUriError."""
    text = os.fspath(location)
    if not text:
        raise BadUriError("'' names no folder to save to or load from")
    return root_uri(text).rstrip("/")


def open_folder(location: Location) -> "Folder":
    """Open a folder; nothing is read yet. Raises BadUriError, which suggests what to write instead."""
    # Only the put of `.metadata` has to be exclusive, and one process puts it.
    store = open_store(folder_uri(location), unsafe_single_writer=True)
    return _StreamedFolder(store) if isinstance(store, StreamedStore) else Folder(store)


class Located:
    """The folder of the next save or load, for torch's storage classes."""

    _does: str
    """Words for an error: what a class does with the folder, and how to name it."""

    def __init__(self, path: Location | None) -> None:
        if path is not None:
            folder_uri(path)
        self._location = path

    def __repr__(self) -> str:
        where = "" if self._location is None else f" {str(self._location)!r}"
        return f"<{type(self).__name__}{where}>"

    @property
    def checkpoint_id(self) -> Location | None:
        """The folder of the next save or load."""
        return self._location

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Location) -> bool:
        """Return whether `checkpoint_id` names a folder of a store that is known, in a form that is safe."""
        try:
            open_folder(checkpoint_id).close()
        except BadUriError:
            return False
        return True

    def reset(self, checkpoint_id: Location | None = None) -> None:
        """Prepare for another save or load, in `checkpoint_id` if it is given. Raises BadUriError."""
        if checkpoint_id is not None:
            folder_uri(checkpoint_id)
            self._location = checkpoint_id

    def _open(self) -> "Folder":
        if self._location is None:
            raise BadUriError(f"no folder to {self._does}(…, checkpoint_id=path)")
        return open_folder(self._location)


class Folder:
    """Access one folder by paths that begin with its name, so that code for a root with many folders can use it."""

    def __init__(self, store: Store) -> None:
        """Wrap `store`, whose root is the folder itself."""
        self._store = store
        self.uri, _, self.name = store.uri.rpartition("/")
        """URI of the folder above this one, and this one's name."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def own_uri(self) -> str:
        """URI of this folder."""
        return self._store.uri

    def path(self, name: str) -> str:
        """Return the path of the object `name` in the folder."""
        return f"{self.name}/{name}"

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return self._store.put_if_absent(self._within(path), data)

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self._store.write(self._within(path), parts)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._store.read(self._within(path), offset, length)

    def list(self, prefix: str) -> list[ObjectStat]:
        found = self._store.list(self._within(prefix))
        return [replace(stat, path=self.path(stat.path)) for stat in found]

    def delete(self, path: str) -> None:
        self._store.delete(self._within(path))

    def close(self) -> None:
        self._store.close()

    def _within(self, path: str) -> str:
        folder, slash, name = path.partition("/")
        if not slash or folder != self.name:
            raise ValueError(f"{path!r} isn't in {self.name!r}")
        return name


@final
class _StreamedFolder(Folder):
    """A folder in a StreamedStore, and one itself: a writer recognizes these by `streams`."""

    def __init__(self, store: StreamedStore) -> None:
        super().__init__(store)
        self.streams = store.streams
