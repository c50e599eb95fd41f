"""Keep the last known objects of one kind."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["Change", "Objects"]

T = TypeVar("T")


class Change(NamedTuple, Generic[T]):
    """An object before and after a change."""

    before: T | None
    item: T
    deleted: bool


class Objects(Generic[T]):
    """Keep the objects of one kind by uid and by name. An object is forgotten once another one has its name.

    `note` is called with each change, and returns the keys that it concerns.
    """

    def __init__(
        self, read: Callable[[RawObject], T], note: Callable[[Change[T]], Iterable[ObjectKey]]
    ) -> None:
        self._read = read
        self._note = note
        self._items: dict[str, T] = {}
        self._uids: dict[Hashable, str] = {}
        """By namespace and name."""

        self._names: dict[str, Hashable] = {}

    def record(self, raw: RawObject, *, deleted: bool) -> Iterator[ObjectKey]:
        """Keep the object, or forget it. Yield the keys that the change concerns."""
        meta, item = raw["metadata"], self._read(raw)
        uid, name = meta["uid"], (meta.get("namespace"), meta["name"])
        before = self._items.get(uid)
        if deleted:
            self._drop(uid)
        else:
            named = self._uids.get(name, uid)
            if named != uid:  # an earlier object, whose deletion no watch has reported
                yield from self.forget([named])
            self._items[uid], self._names[uid], self._uids[name] = item, name, uid
        yield from self._note(Change(before, item, deleted))

    def forget(self, gone: Iterable[str]) -> Iterator[ObjectKey]:
        """Forget the objects with these uids. Yield the keys that this concerns."""
        for uid in gone:
            if (item := self._items.get(uid)) is not None:
                self._drop(uid)
                yield from self._note(Change(item, item, deleted=True))

    def get(self, namespace: str | None, name: str) -> T | None:
        return self._items.get(self._uids.get((namespace, name), ""))

    def find(self, uid: str) -> T | None:
        return self._items.get(uid)

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    def _drop(self, uid: str) -> None:
        if self._items.pop(uid, None) is not None:
            name = self._names.pop(uid)
            if self._uids.get(name) == uid:
                del self._uids[name]
