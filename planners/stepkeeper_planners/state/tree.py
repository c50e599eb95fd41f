"""Flatten a nested state into named tensors and values.

Names are those that torch.distributed.checkpoint gives: keys joined with dots.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any, Final, TypeVar

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parameter import is_lazy
from typing_extensions import override

from stepkeeper_planners.adapters import identity
from stepkeeper_planners.adapters.forms import are_ordinary
from stepkeeper_planners.errors import DuplicateNameError, UnsupportedValueError
from stepkeeper_planners.state.named_optimizer import NamedState, name_optimizers
from stepkeeper_planners.state.per_rank import PerRank, Resize, parse_stored_name
from stepkeeper_planners.state.scalars import PLAIN_LEAVES, has_plain_leaves_only, has_scalars_only
from stepkeeper_planners.state.whole import Whole

T = TypeVar("T")
Path = tuple[str | int, ...]
Modules = Sequence[tuple[Path, torch.nn.Module]]
_Found = list[tuple[Path, object]]

_MAX_DEPTH: Final = 100
_PLAIN_DICTS: Final = frozenset({dict, OrderedDict, defaultdict})
_NEVER_STATEFUL: Final = PLAIN_LEAVES | {dict, list, tuple, FunctionType, MethodType}


class NamedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a state by name, with the names of the state before: a dict of its own would take longer."""

    def __init__(self, places: Mapping[str, int], ordered: Sequence[torch.Tensor]) -> None:
        """Name each tensor in `ordered` by its place there. `places` has the names in order."""
        self._places: Final = places
        self.ordered: Final = ordered

    @override
    def __getitem__(self, name: str) -> torch.Tensor:
        return self.ordered[self._places[name]]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    @override
    def __len__(self) -> int:
        return len(self.ordered)


def order_tensors(tensors: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the tensors in the order of their names, without a line of Python for each."""
    return tensors.ordered if isinstance(tensors, NamedTensors) else list(tensors.values())


def pick_at(indexes: Sequence[int]) -> Callable[[Sequence[T]], Sequence[T]]:
    """Return a function that picks the items at these indexes, in one pass in C."""
    if len(indexes) < 2:
        return lambda items: [items[index] for index in indexes]
    return itemgetter(*indexes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """The leaves of a state by name. The tensors are the state's own, to be read or filled in place."""

    tensors: Mapping[str, torch.Tensor]
    """Each tensor once. Tied tensors have the first of their names in sorted order, not in the order of dicts."""
    values: dict[str, object]
    aliases: dict[str, str] = field(default_factory=dict)
    """The other names of tied tensors → the name in `tensors`."""
    paths: dict[str, Path] = field(default_factory=dict)
    """Name → the keys that lead to it, as in torch.distributed.checkpoint's planner data."""
    per_rank: dict[str, object] = field(default_factory=dict)
    """The values of PerRank entries, to be stored under `stored_name(name, ranks)`. They are not in `paths`."""
    resizers: dict[str, Resize | None] = field(default_factory=dict)
    """The `resize` function of each entry of `per_rank`, if it has one."""
    wholes: frozenset[str] = frozenset()
    """Names of the values that were in a `Whole`: each is stored as one value."""
    modules: Modules = ()
    """The modules of the state, and the keys that lead to each."""
    tree: Any = None
    """The nested state, with every Stateful replaced by the result of its state_dict()."""


def flatten_state(state: Mapping[str, object]) -> FlatState:
    """Flatten a nested state. Call state_dict() of every Stateful once.

    Raises DuplicateNameError if two entries get the same name; UnsupportedValueError if a Stateful holds
    itself; a Stateful, PerRank or Whole is in a tuple; a parameter is lazy, or a tensor is nested.
    """
    return flatten_resolved(*resolve_state(state))


def resolve_state(state: Mapping[str, object]) -> tuple[Any, Modules]:
    """Replace every Stateful in a nested state by the result of its state_dict(). Return the modules too.

    Containers are copied. The state of an optimizer that lies in the state's own dicts and lists is named by its
    parameters: see `name_optimizers`. In a PerRank, a Whole or another object's state_dict() it keeps the numbers that
    torch gives, since other code reads it. Raises as `flatten_state` and `name_optimizers`.
    """
    found: _Found = []
    tree = _resolve(state, (), None, found)
    name_optimizers(found, tree)
    return tree, [(path, node) for path, node in found if isinstance(node, torch.nn.Module)]


def flatten_resolved(tree: Any, modules: Modules = ()) -> FlatState:
    """Flatten what `resolve_state` returned. Raises DuplicateNameError and UnsupportedValueError."""
    paths, named, others = _name_leaves(tree)
    per_rank = {name: leaf for name, leaf in others.items() if isinstance(leaf, PerRank)}
    wholes = {name: leaf.value for name, leaf in others.items() if isinstance(leaf, Whole)}
    tensors, aliases = _join_tied(named)
    flat = FlatState(
        tensors=tensors,
        values={name: leaf for name, leaf in others.items() if name not in per_rank} | wholes,
        aliases=aliases,
        paths={name: path for name, path in paths.items() if name not in per_rank} if per_rank else paths,
        per_rank={name: leaf.value for name, leaf in per_rank.items()},
        resizers={name: leaf.resize for name, leaf in per_rank.items()},
        wholes=frozenset(wholes),
        modules=modules,
        tree=tree,
    )
    _check_stored_names(flat)
    return flat


def _name_leaves(tree: Any) -> tuple[dict[str, Path], dict[str, torch.Tensor], dict[str, object]]:
    """Return the path of each leaf, the tensors and the other leaves, by name. In short passes: leaves may be many.

    Raises DuplicateNameError.
    """
    leaves = list(_iterate_leaves(tree, ()))
    names = [join_path(path) for path, _ in leaves]
    by_name = dict(zip(names, leaves, strict=True))
    if len(by_name) < len(leaves):
        raise _duplicate_name(tree, next(name for name, n_times in Counter(names).items() if n_times > 1))
    tensors = {name: leaf for name, (_, leaf) in by_name.items() if isinstance(leaf, torch.Tensor)}
    others = {name: leaf for name, (_, leaf) in by_name.items() if name not in tensors}
    return {name: path for name, (path, _) in by_name.items()}, tensors, others


def _join_tied(named: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return each tensor once, and the further names of tied ones. Raises UnsupportedValueError for a nested one."""
    names, tensors = list(named), list(named.values())
    ordinary = are_ordinary(tensors)
    if not ordinary:
        _refuse_nested(named)
    found = find_tied(tensors, ordinary=ordinary)
    if not found:
        return named, {}
    # By the index of each tensor's first leaf: the names of all its leaves, with their indexes.
    tied: dict[int, dict[str, int]] = {index: {name: index} for index, name in enumerate(names)}
    for index, earlier in found.items():
        tied[earlier] |= tied.pop(index)
    firsts = {min(each): each for each in tied.values()}
    return (
        {first: tensors[each[first]] for first, each in firsts.items()},
        {name: first for first, each in firsts.items() for name in each if name != first},
    )


def _refuse_nested(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse nested tensors here: a strided one has no shape, which its identity and its structure are made of."""
    for name, tensor in tensors.items():
        if _may_be_nested(tensor) and tensor.is_nested:
            raise UnsupportedValueError(
                f"{name}: a nested tensor can't be stored; store the list of its parts, list(tensor.unbind())"
            )


def find_tied(tensors: Sequence[torch.Tensor], *, ordinary: bool) -> dict[int, int]:
    """Find the tensors that are tied to an earlier one: the index of each, and that of the earliest.

    `ordinary` is True if all are strided tensors on the CPU, of torch's own classes.
    """
    candidates: Sequence[int] = range(len(tensors))
    if ordinary:
        # Those that begin where no other does are tied to none. Almost all do.
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if len(set(addresses)) == len(addresses):
            return {}
        times = Counter(addresses)
        candidates = [index for index in candidates if times[addresses[index]] > 1]
    first: dict[object, int] = {}
    tied: dict[int, int] = {}
    for index in candidates:
        same = identity(tensors[index])
        if same is not None and first.setdefault(same, index) != index:
            tied[index] = first[same]
    return tied


def iterate_named_leaves(tree: Any) -> Iterator[tuple[str, object]]:
    """Yield the leaves of the tree that `resolve_state` returned, in its order, with their names."""
    return ((join_path(path), leaf) for path, leaf in _iterate_leaves(tree, ()))


def join_path(path: Path) -> str:
    return ".".join(map(str, path))


def _check_depth(path: Path) -> None:
    """Raise UnsupportedValueError if the path is as long as only those of a state that holds itself are."""
    if len(path) > _MAX_DEPTH:
        raise UnsupportedValueError(
            f"{join_path(path[:5])}…: nested more than {_MAX_DEPTH} deep, or contains itself"
        )


def _resolve(node: object, path: Path, box: type | None, found: _Found) -> object:
    """Replace Statefuls by their state, copy containers, and keep leaves. `box` is the PerRank or Whole around it.

    `found` gets the modules, and the other Statefuls that are in no box, with the keys that lead to each.
    """
    _check_depth(path)
    if is_stateful(node):
        assert isinstance(node, Stateful)
        if box is None or isinstance(node, torch.nn.Module):
            found.append((path, node))
        # Another list: the optimizers in its state keep torch's numbers.
        return _resolve(node.state_dict(), path, box, [])
    if isinstance(node, PerRank | Whole):
        return _resolve_box(node, path, box, found)
    if isinstance(node, Mapping):
        return _resolve_items(node, path, box, found)
    if isinstance(node, list):
        if has_scalars_only(node):
            return list(node)
        return [_resolve(value, (*path, index), box, found) for index, value in enumerate(node)]
    if isinstance(node, tuple):
        _refuse_objects(node, path)
    if isinstance(node, torch.Tensor) and is_lazy(node):
        raise UnsupportedValueError(
            f"{join_path(path)}: a lazy parameter has no shape before the model's first run"
        )
    return node


def _resolve_box(box: PerRank | Whole, path: Path, outer: type | None, found: _Found) -> object:
    """Resolve the content of a box. A box in another one makes no difference: the outer one is stored as one value."""
    if outer is Whole and isinstance(box, PerRank):
        raise UnsupportedValueError(
            f"{join_path(path)}: a PerRank can't be in a Whole, which is the same on all ranks; put it beside the "
            "Whole, or put the Whole into a PerRank"
        )
    value = _resolve(box.value, path, outer or type(box), found)
    if outer is not None:
        return value
    return PerRank(value, box.resize) if isinstance(box, PerRank) else Whole(value)


def _resolve_items(node: Mapping[Any, Any], path: Path, box: type | None, found: _Found) -> dict[Any, Any]:
    resolved = empty_like(node)
    if type(node) in _PLAIN_DICTS and has_plain_leaves_only(node.values()):
        resolved.update(node)
    else:
        for key, value in node.items():
            resolved[key] = _resolve(value, (*path, key), box, found)
    return resolved


def _refuse_objects(node: object, path: Path) -> None:
    """Refuse Statefuls and PerRanks in a tuple, which is one value, as in stock torch: none of them would be called."""
    _check_depth(path)
    if is_stateful(node) or isinstance(node, PerRank | Whole):
        kind = type(node).__name__
        raise UnsupportedValueError(f"{join_path(path)}: a {kind} can't be in a tuple; use a list or a dict")
    if isinstance(node, Mapping):
        for key, value in node.items():
            _refuse_objects(value, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            _refuse_objects(value, (*path, index))


def is_stateful(node: object) -> bool:
    # A class has the methods too, but no state.
    kind = type(node)
    if kind in _NEVER_STATEFUL or isinstance(node, torch.Tensor | type):
        return False
    # Checking the protocol takes ten times as long, and a train loop waits for this at every step.
    of_class = callable(getattr(kind, "state_dict", None)) and callable(
        getattr(kind, "load_state_dict", None)
    )
    return of_class or isinstance(node, Stateful)


def _may_be_nested(tensor: torch.Tensor) -> bool:
    # Other subclasses may warn or raise when an attribute is read.
    kind = type(tensor)
    return kind in PLAIN_LEAVES or kind.__module__.startswith("torch.nested.")


def _check_stored_names(flat: FlatState) -> None:
    """Raise DuplicateNameError if an entry has the name under which a rank's own value will be stored."""
    for fqn in flat.paths if flat.per_rank else ():
        stored = parse_stored_name(fqn)
        if stored is not None and stored[0] in flat.per_rank:
            raise DuplicateNameError(
                f"{fqn!r} is the name under which {stored[0]!r} of rank {stored[1]} is stored; rename one of them"
            )


def _duplicate_name(tree: Any, fqn: str) -> DuplicateNameError:
    """Return the error that shows the keys as they are in the state: 1 and "1" are one name, but two keys."""
    paths = (keys for keys, _ in _iterate_leaves(tree, (), key_of=lambda key: key))
    one, other, *_ = (keys for keys in paths if join_path(keys) == fqn)
    return DuplicateNameError(
        f"{other} and {one} are both named {fqn!r} once keys are joined with dots; rename one"
    )


def _iterate_leaves(
    node: object, path: Path, *, key_of: Callable[[Any], Any] = str
) -> Iterator[tuple[Path, object]]:
    """Yield the leaves with the keys that lead to them: those of dicts as `key_of` makes them."""
    if isinstance(node, Mapping):
        if has_plain_leaves_only(node.values()):
            yield from (((*path, key_of(key)), value) for key, value in node.items())
            return
        for key, value in node.items():
            yield from _iterate_leaves(value, (*path, key_of(key)), key_of=key_of)
    elif is_leaf(node):
        yield path, node
    else:
        assert isinstance(node, list)
        for index, value in enumerate(node):
            yield from _iterate_leaves(value, (*path, index), key_of=key_of)


def is_leaf(node: object) -> bool:
    """Return whether a node is a leaf. As in stock torch, so are a tuple, and a list without tensors or mappings."""
    if isinstance(node, Mapping):
        return False
    if not isinstance(node, list) or has_scalars_only(node):
        return True
    return not any(
        isinstance(item, torch.Tensor | PerRank | Whole)
        or (isinstance(item, Mapping | list) and not is_leaf(item))
        for item in node
    )


def empty_like(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Make an empty dict of the same kind. Stateful objects get back the kinds of dict that they gave."""
    if isinstance(mapping, NamedState):
        return mapping.with_content({})
    if isinstance(mapping, Counter):
        return Counter()
    if isinstance(mapping, defaultdict):
        return defaultdict(mapping.default_factory)
    if not isinstance(mapping, OrderedDict):
        return {}
    empty: OrderedDict[Any, Any] = OrderedDict()
    if hasattr(mapping, "_metadata"):
        # torch.nn.Module.load_state_dict() reads version numbers from this attribute.
        vars(empty)["_metadata"] = mapping._metadata  # noqa: SLF001 — where nn.Module.state_dict() puts it
    return empty
