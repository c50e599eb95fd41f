"""Store objects in this process's memory, with a hook before and after each operation. Imported, it opens memory://."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, final
from urllib.parse import SplitResult

import google_crc32c

from stepkeeper.errors import MissingObjectError, ObjectExistsError
from stepkeeper.storage.base import Buffer, ObjectStat, check_path
from stepkeeper.storage.open import OPENERS

Operation = Literal["put_if_absent", "write", "read", "list", "delete"]

FaultHook = Callable[[Literal["before", "after"], Operation, str], None]
"""Called around each operation. What it raises before, was not applied; what it raises after, was."""


@final
class MemoryBucket:
    """The objects. Stores of several imagined processes share them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.times_unix_s: dict[str, float] = {}
        """When objects were put, by `clock`."""

        self.clock: Callable[[], float] = time.time
        """The store's own clock, in seconds since 1970."""

        self.lock = threading.Lock()


_BUCKETS: Final[dict[str, MemoryBucket]] = {}


def named_bucket(name: str) -> MemoryBucket:
    """Return the bucket of `memory://name`; there is one per process."""
    return _BUCKETS.setdefault(name, MemoryBucket())


@final
class MemoryStore:
    def __init__(
        self, bucket: MemoryBucket | None = None, *, name: str = "", hook: FaultHook | None = None
    ) -> None:
        self.bucket = bucket if bucket is not None else MemoryBucket()
        self.hook = hook
        self._uri = f"memory://{name}"

    @property
    def uri(self) -> str:
        return self._uri

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._fault("before", "put_if_absent", check_path(path))
        with self.bucket.lock:
            won = path not in self.bucket.objects
            if won:
                self.bucket.objects[path] = data
                self.bucket.times_unix_s[path] = self.bucket.clock()
        self._fault("after", "put_if_absent", path)
        return won

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self._fault("before", "write", check_path(path))
        data = b"".join(parts)
        with self.bucket.lock:
            if path not in self.bucket.objects:
                self.bucket.times_unix_s[path] = self.bucket.clock()
            if self.bucket.objects.setdefault(path, data) != data:
                raise ObjectExistsError(f"{self._uri}/{path} exists with other bytes; it was not overwritten")
        self._fault("after", "write", path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self._fault("before", "read", check_path(path))
        with self.bucket.lock:
            if path not in self.bucket.objects:
                raise MissingObjectError(f"{self._uri}/{path} does not exist")
            data = self.bucket.objects[path]
        self._fault("after", "read", path)
        return data[offset:] if length is None else data[offset : offset + length]

    def list(self, prefix: str) -> list[ObjectStat]:
        self._fault("before", "list", prefix)
        with self.bucket.lock:
            times_unix_s = self.bucket.times_unix_s
            found = sorted(
                (path, data, times_unix_s.get(path))
                for path, data in self.bucket.objects.items()
                if path.startswith(prefix)
            )
        self._fault("after", "list", prefix)
        return [
            ObjectStat(path=path, size_bytes=len(data), crc32c=google_crc32c.value(data), time_unix_s=put_s)
            for path, data, put_s in found
        ]

    def list_page(self, prefix: str, start: str, limit: int) -> Sequence[ObjectStat]:
        return [stat for stat in self.list(prefix) if stat.path >= start][:limit]

    def delete(self, path: str) -> None:
        self._fault("before", "delete", check_path(path))
        with self.bucket.lock:
            self.bucket.objects.pop(path, None)
            self.bucket.times_unix_s.pop(path, None)
        self._fault("after", "delete", path)

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _fault(self, moment: Literal["before", "after"], operation: Operation, path: str) -> None:
        if self.hook is not None:
            self.hook(moment, operation, path)


def _open(_: str, parts: SplitResult) -> MemoryStore:
    name = (parts.netloc + parts.path).rstrip("/")
    return MemoryStore(named_bucket(name), name=name)


OPENERS["memory"] = _open
