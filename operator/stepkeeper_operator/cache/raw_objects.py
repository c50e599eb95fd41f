"""Keep the newest known version of every object of one kind, as JSON."""

from typing import Any

from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["RawObjects"]


class RawObjects:
    """Keep the objects of a kind by key, and their keys by uid."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._objects: dict[ObjectKey, dict[str, Any]] = {}
        self._keys: dict[str, ObjectKey] = {}

    def record(self, raw: RawObject) -> ObjectKey | None:
        """Keep the object. Return None if a newer version is known: answers to our own writes outrun the watch."""
        meta = raw["metadata"]
        key = self._key_of(raw)
        known = self._objects.get(key)
        if known is not None and _version(known) > _version(raw):
            return None
        slim = {name: value for name, value in meta.items() if name != "managedFields"}
        self._objects[key] = {**raw, "metadata": slim}
        self._keys[meta["uid"]] = key
        return key

    def drop(self, raw: RawObject) -> ObjectKey:
        """Forget an object that was deleted. Another one with its name stays."""
        self.forget(raw["metadata"]["uid"])
        return self._key_of(raw)

    def forget(self, uid: str) -> ObjectKey | None:
        """Forget the object with that uid. Return the key that it had, or None if it isn't known."""
        key = self._keys.pop(uid, None)
        if key is not None and key in self._objects and self._objects[key]["metadata"]["uid"] == uid:
            del self._objects[key]
        return key

    def get(self, key: ObjectKey) -> RawObject | None:
        return self._objects.get(key)

    def find_key(self, uid: str) -> ObjectKey | None:
        """Return the key of the object with that uid."""
        return self._keys.get(uid)

    def list_keys(self) -> tuple[ObjectKey, ...]:
        return tuple(self._objects)

    def list_uids(self) -> frozenset[str]:
        return frozenset(self._keys)

    def _key_of(self, raw: RawObject) -> ObjectKey:
        return ObjectKey(self.kind, raw["metadata"]["namespace"], raw["metadata"]["name"])


def _version(raw: RawObject) -> int:
    text = raw["metadata"].get("resourceVersion", "")
    return int(text) if text.isdecimal() else 0
