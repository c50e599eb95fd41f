"""A store seen through another: what a test changes is all that its class says."""

from collections.abc import Sequence

from stepkeeper.storage.base import Buffer, ObjectStat, Store


class Behind:
    """Passes everything on, except for pages: those only some stores have."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def uri(self) -> str:
        return self.store.uri

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return self.store.put_if_absent(path, data)

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self.store.write(path, parts)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.store.read(path, offset, length)

    def list(self, prefix: str) -> list[ObjectStat]:
        return self.store.list(prefix)

    def delete(self, path: str) -> None:
        self.store.delete(path)

    def close(self) -> None:
        self.store.close()
