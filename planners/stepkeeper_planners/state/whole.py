"""Save a value as one piece, though its shape and length may change from save to save, and fill it after a load."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial

from torch.distributed.checkpoint.stateful import Stateful

from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.random_state import RandomState

__all__ = ["Whole", "fill_value"]


@dataclass(slots=True, eq=False)
class Whole:
    """Mark a part of the state that is saved as one value, and loaded regardless of its present content.

    Put it into the state in place of the value: `{"history": Whole(history)}`. It is one entry of the checkpoint, under
    its own name. A load doesn't compare its content: a list may have grown meanwhile, and a dict may have new keys. It
    is the same on all ranks, like other values; use `PerRank` for what each rank has of its own.

    A load fills a list or dict in place, so that it stays the object that the training holds. Another value replaces
    `value`. An object with load_state_dict() gets the result of its state_dict().

    Args:
        value: a list, a dict, or another value as it may be in a state; also an object with state_dict() and
            load_state_dict(). The tensors in it are on the CPU.
    """

    value: object


def fill_value(current: object, loaded: object, *, in_place: bool, last: list[Callable[[], None]]) -> object:
    """Return the loaded value. An object in `current`, or in its dicts, stays, and gets its part by load_state_dict().

    With `in_place`, lists and dicts stay the same objects. `last` gets the calls that set random generators: other
    objects may draw numbers while they load.
    """
    match current:
        case RandomState():
            last.append(partial(current.load_state_dict, loaded))  # type: ignore[arg-type]  # as below
        case PerRank() | Whole():
            # A PerRank or Whole in another one.
            within = in_place or isinstance(current, Whole)
            current.value = fill_value(current.value, loaded, in_place=within, last=last)
        case _ if isinstance(current, Stateful) and not isinstance(current, type):
            current.load_state_dict(loaded)  # type: ignore[arg-type]  # the result of its state_dict()
        case _:
            return _fill_plain(current, loaded, in_place=in_place, last=last)
    return current


def _fill_plain(current: object, loaded: object, *, in_place: bool, last: list[Callable[[], None]]) -> object:
    """Return the loaded value, or the dict or list that is filled with it. In a dict, each item is filled."""
    if isinstance(current, Mapping) and isinstance(loaded, Mapping):
        items = {
            key: fill_value(current.get(key), part, in_place=in_place, last=last)
            for key, part in loaded.items()
        }
        if not in_place or not isinstance(current, MutableMapping):
            return items
        current.clear()
        current.update(items)
        return current
    if in_place and type(current) is list and type(loaded) is list:
        current[:] = loaded
        return current
    return loaded
