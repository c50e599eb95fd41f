"""Damage entries of the log, and know what they were: processes have lost that, those who check them haven't."""

from collections.abc import Mapping, MutableMapping

__all__ = ["LOG", "damage", "lost_slots", "slot_in", "undamaged"]

LOG = ".stepkeeper/log/"
_BAD = b"bad: "
_LOST = "lost/"
"""Where an entry is kept that is gone. Nobody looks there."""


def damage(objects: MutableMapping[str, bytes], path: str, *, gone: bool) -> bool:
    """Damage the entry, or take it away. It can be damaged once; the newest one stays, for nothing shows its loss."""
    if path not in objects or path in lost_paths(objects):
        return False
    if gone and path == max(each for each in objects if each.startswith(LOG)):
        return False
    data = objects.pop(path)
    if gone:
        objects[_LOST + path] = data
    else:
        objects[path] = _BAD + data
    return True


def lost_paths(objects: Mapping[str, bytes]) -> frozenset[str]:
    """Return the paths of the objects that were damaged."""
    gone = (path.removeprefix(_LOST) for path in objects if path.startswith(_LOST))
    return frozenset((*gone, *(path for path in objects if objects[path].startswith(_BAD))))


def lost_slots(objects: Mapping[str, bytes]) -> frozenset[int]:
    """Return the slots whose entries can't be read any more."""
    return frozenset(slot_in(path) for path in lost_paths(objects))


def undamaged(objects: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return the log as it would be without the damage."""
    log = {path: data.removeprefix(_BAD) for path, data in objects.items() if path.startswith(LOG)}
    lost = {path.removeprefix(_LOST): data for path, data in objects.items() if path.startswith(_LOST)}
    return log | lost


def slot_in(path: str) -> int:
    return int(path.removeprefix(LOG).removesuffix(".json"))
