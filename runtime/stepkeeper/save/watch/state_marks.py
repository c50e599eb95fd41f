"""Mark some of the tensors in a training's state, to notice later whether they were changed.

The train loop waits for this at every step, so a few tensors stand for all: an optimizer's step changes all that it
trains, and so does an average of the weights that is put in their place.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Self

import torch

from stepkeeper.save.given_state import GivenState
from stepkeeper_planners.adapters.changes import ChangeMark, mark_changes
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import is_stateful
from stepkeeper_planners.state.whole import Whole

__all__ = ["StateMarks"]

_VISITS: Final = 32
"""So many containers, objects and functions of a state are looked into."""

_ENTRIES: Final = 16
"""So many entries of a container, from each of its ends."""

_TENSORS: Final = 2
"""So many tensors of a container, from each of its ends."""

_PARAMETERS: Final = 4
"""So many parameters of a module, and groups of an optimizer."""

_MOST_TENSORS: Final = 16
"""So many tensors of a state."""

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})

_HOLDERS: Final = (
    torch.nn.Module, torch.optim.Optimizer, PerRank, Whole, Mapping, list, tuple, FunctionType, MethodType, partial
)  # fmt: skip
"""Kinds of things in a state that there may be tensors in."""


@dataclass(frozen=True, slots=True)
class StateMarks:
    """Marks of some tensors in a state as they are now. Nothing is called, and the network isn't used.

    Of a state that a function builds these are the tensors that the function names: the variables that it has from
    around it, the attributes of its object, and so on through functions that it calls.
    """

    marks: tuple[ChangeMark, ...]

    @classmethod
    def of(cls, state: GivenState) -> Self:
        """Mark the tensors of `state`."""
        return cls(tuple(map(mark_changes, islice(_Walk().find_tensors(state), _MOST_TENSORS))))

    def differ_from(self, earlier: "StateMarks") -> bool:
        """Return True if the tensors were changed since `earlier`, or are others."""
        return len(self.marks) != len(earlier.marks) or any(
            now.differs_from(then) for now, then in zip(self.marks, earlier.marks, strict=True)
        )


class _Walk:
    """One walk through a state: what is near its top comes first."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._queue: deque[tuple[Any, bool]] = deque()
        """What is to be looked into; and whether it was reached through the attributes of an object. An object has
        other tensors too, as a data loader's next batch: there only what is trained counts.
        """

    def find_tensors(self, state: GivenState) -> Iterator[torch.Tensor]:
        self._queue.append((state, False))
        visits = 0
        while self._queue and visits < _VISITS:
            node, of_object = self._queue.popleft()
            if id(node) not in self._seen:
                self._seen.add(id(node))
                visits += 1
                yield from self._look_into(node, of_object)

    def _look_into(self, node: Any, of_object: bool) -> Iterator[torch.Tensor]:
        match node:
            case torch.nn.Module():
                yield from islice(node.parameters(), _PARAMETERS)
            case torch.optim.Optimizer():
                for group in islice(node.param_groups, _PARAMETERS):
                    yield from group["params"][:1]
                    yield from group["params"][-1:]
            case PerRank() | Whole():
                yield from self._take([node.value], of_object)
            case Mapping() | list() | tuple():
                yield from self._take_ends(node, of_object)
            case FunctionType() | MethodType() | partial():
                named = _list_named(node)
                yield from self._take(named, of_object)
                self._queue.extend((each, True) for each in named if _is_object(each))
            case _:
                yield from self._take(_list_attributes(node), of_object=True)

    def _take_ends(self, node: Any, of_object: bool) -> Iterator[torch.Tensor]:
        """Take what is at both ends of a container. Only Python's own are surely read from their end."""
        items: Any = node.values() if isinstance(node, Mapping) else node
        first = list(islice(items, 2 * _ENTRIES))
        if len(node) > len(first) and isinstance(node, dict | list | tuple):
            first = first[:_ENTRIES] + list(islice(reversed(items), _ENTRIES))[::-1]
        yield from self._take(first, of_object)

    def _take(self, items: list[Any], of_object: bool) -> Iterator[torch.Tensor]:
        """Yield the tensors among these, and queue what there may be others in."""
        items = [each for each in items if type(each) not in _SCALARS]
        tensors = [each for each in items if isinstance(each, torch.Tensor)]
        if len(tensors) < len(items):
            self._queue.extend((each, of_object) for each in items if _may_hold_tensors(each))
        if of_object:
            tensors = [each for each in tensors if each.requires_grad and each.is_leaf]
        yield from tensors[:_TENSORS]
        yield from tensors[_TENSORS:][-_TENSORS:]


def _may_hold_tensors(item: object) -> bool:
    return not isinstance(item, torch.Tensor) and (isinstance(item, _HOLDERS) or is_stateful(item))


def _is_object(item: object) -> bool:
    """Tell an object of the training's own, whose attributes a function may read."""
    return hasattr(item, "__dict__") and not isinstance(item, (*_HOLDERS, torch.Tensor, ModuleType, type))


def _list_named(function: FunctionType | MethodType | partial[Any]) -> list[Any]:
    """List the values that a function has at hand: variables from around it, defaults, its object, arguments."""
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    named = _list_names(function.__code__)
    found = [function.__globals__[name] for name in named if name in function.__globals__]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a variable without a value yet
            continue
    return [*found, *(function.__defaults__ or ())]


def _list_attributes(owner: object) -> list[Any]:
    """List an object's attributes."""
    return list(islice(getattr(owner, "__dict__", {}).values(), 2 * _ENTRIES))


@cache
def _list_names(code: CodeType) -> frozenset[str]:
    """List the names that a function's code uses, also in functions inside it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*map(_list_names, inner))
