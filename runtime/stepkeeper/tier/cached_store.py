"""Read a root's objects from copies on a local disk where there are some. Callers have to verify the bytes."""

import threading
from collections.abc import Collection, Sequence

from stepkeeper.storage.base import Buffer, ObjectStat, Store
from stepkeeper.tier.disk import LocalTier

__all__ = ["CachedStore"]


class CachedStore:
    """A root with copies on a local disk. It defines which objects exist; bytes come from the disk first."""

    def __init__(self, root: Store, tier: LocalTier) -> None:
        self._root = root
        self.uri = root.uri
        self._tier = tier
        self._lock = threading.Lock()
        self._given: set[str] = set()
        """Objects of which some bytes came from the local disk."""

        self._distrusted: set[str] = set()
        """Objects whose copies were wrong: they are read from the root."""

        self._used: set[str] = set()
        """Folders of saves that are marked as used, once each."""

        self._n_bytes = 0

    def take_read_bytes(self) -> int:
        """Count the bytes that were read from the local disk since the last call."""
        with self._lock:
            n_bytes, self._n_bytes = self._n_bytes, 0
        return n_bytes

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return self._root.put_if_absent(path, data)

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self._root.write(path, parts)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = None if path in self._distrusted else self._tier.read(path, offset, length)
        if data is None:
            return self._root.read(path, offset, length)
        folder = path.rpartition("/")[0]
        with self._lock:
            self._n_bytes += len(data)
            self._given.add(path)
            is_first = folder not in self._used
            self._used.add(folder)
        if is_first:
            self._tier.mark_used(folder)
        return data

    def list_copied(self, prefix: str) -> Collection[str]:
        """List the objects with this prefix that are read from the local disk."""
        return self._tier.list_held(prefix) - self._distrusted

    def distrust(self, path: str) -> bool:
        """Read the object from the root from here on, and drop its copy. Return True if that was read."""
        with self._lock:
            was_given = path in self._given and path not in self._distrusted
            self._distrusted.add(path)
        self._tier.forget(path)
        return was_given

    def list(self, prefix: str) -> list[ObjectStat]:
        return self._root.list(prefix)

    def delete(self, path: str) -> None:
        self._tier.forget(path)
        self._root.delete(path)

    def close(self) -> None:
        self._root.close()
