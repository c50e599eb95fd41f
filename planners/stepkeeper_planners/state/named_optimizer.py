"""Put the names of parameters in place of their numbers in the state_dict() of optimizers, as torch's DCP does.

A checkpoint then doesn't depend on the order of the parameters. A load puts the numbers back.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import getitem
from typing import Any, Final

from torch import nn
from torch.optim import LBFGS, Optimizer

from stepkeeper_planners.errors import DuplicateNameError, UnsupportedValueError
from stepkeeper_planners.state.parameter_names import name_groups, name_parameters, name_tensors
from stepkeeper_planners.state.scalars import has_plain_leaves_only, has_scalars_only

__all__ = ["ADDED", "NamedState", "find_named_states", "name_optimizers"]

ADDED: Final = "\0added"
"""The name, below a group's, of the options that the group lacks and a load adds. No entry of a checkpoint has it."""


class NamedState(dict[str, Any]):
    """An optimizer's state_dict() with the names of its parameters: the layout of get_optimizer_state_dict()."""

    def __init__(
        self,
        content: Mapping[str, Any],
        groups: list[list[str]],
        numbers: Mapping[str, int],
        *,
        is_joint: bool = False,
        load: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        """Hold the content, a state_dict() with names.

        Args:
            content: the state_dict(), with names.
            groups: the names of the optimizer's parameters, by group.
            numbers: the number that the optimizer's own state_dict() has for each name.
            is_joint: whether some state is of all parameters together, in their order, as LBFGS's is.
            load: loads a state with names; None for the optimizer's load_state_dict(), which takes numbers.
        """
        super().__init__(content)
        self.groups: Final = groups
        self.is_joint: Final = is_joint
        self._numbers: Final = numbers
        self._load: Final = load

    @property
    def numbers(self) -> list[list[int]]:
        """The parameters' numbers, by group; empty if the state is loaded by names."""
        return [] if self._load else [[self._numbers[name] for name in names] for names in self.groups]

    def with_content(self, content: Mapping[str, Any]) -> "NamedState":
        """Make one of the same optimizer with other content."""
        return NamedState(content, self.groups, self._numbers, is_joint=self.is_joint, load=self._load)

    def with_numbers(self) -> "NamedState":
        """Make one in which the parameters' state has their numbers."""
        state = {self._numbers.get(key, key): entry for key, entry in self["state"].items()}
        return self.with_content({**self, "state": state})

    def make_load(
        self, optimizer: Any, values: Mapping[str, Any], below: str
    ) -> tuple[Callable[[dict[str, Any]], object], dict[str, Any]]:
        """Return the function that loads this, and its argument. `below` is the groups' name.

        `values` may have options to add to a group: see `ADDED`.
        """
        content = dict(self if self._load else self.with_numbers())
        content["param_groups"] = groups = [
            {**group, **values.get(f"{below}.{number}.{ADDED}", {})}
            for number, group in enumerate(self["param_groups"])
        ]
        # Without numbers, the groups keep the names.
        for group, numbers in zip(groups, self.numbers, strict=False):
            group["params"] = numbers
        return self._load or optimizer.load_state_dict, content


def find_named_states(
    tree: object, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], NamedState]]:
    """Yield the optimizers in a resolved state, with the keys that lead to each."""
    # Dicts of tensors and lists of numbers may be long: they aren't searched.
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping) and not has_plain_leaves_only(tree.values()):
        items = tree.items()
    if isinstance(tree, list) and not has_scalars_only(tree):
        items = enumerate(tree)
    for key, item in items:
        if isinstance(item, NamedState):
            yield (*path, key), item
        elif isinstance(item, Mapping | list):
            yield from find_named_states(item, (*path, key))


def name_optimizers(objects: Sequence[tuple[tuple[Any, ...], object]], tree: Any) -> None:
    """Put names in place of the parameters' numbers in the states of optimizers. All ranks call this.

    A state_dict() of another form than torch's is left as it is, and so is a tree that is an optimizer's.
    FSDP1 exchanges data between ranks here.

    Args:
        objects: the optimizers and modules of a state, with the keys that lead to each.
        tree: the resolved state.

    Raises:
        DuplicateNameError: a parameter is named as another key of its optimizer's state.
        UnsupportedValueError: FSDP1 wraps the parameters, and no module of the state gives their names.
    """
    optimizers = [(path, item) for path, item in objects if path and isinstance(item, Optimizer)]
    modules = {".".join(map(str, path)): item for path, item in objects if isinstance(item, nn.Module)}
    # By the name of each module, the names of its parameters by their id().
    names = {key: name_parameters(module) for key, module in modules.items()} if optimizers else {}
    in_modules = set(chain.from_iterable(names.values()))
    others = [p for _, each in optimizers for p in _list_parameters(each) if id(p) not in in_modules]
    # Where the state has model.state_dict() and not the model, its tensors give the names.
    of_tensors = name_tensors(tree, others, {path for path, _ in optimizers}) if others else {}
    known = names | {key: names.get(key, {}) | named for key, named in of_tensors.items()}
    for (*above, key), optimizer in optimizers:
        container = reduce(getitem, above, tree)
        try:
            named = _read_by_dcp(optimizer, modules, names) or _name_state(optimizer, container[key], known)
        except (DuplicateNameError, UnsupportedValueError) as error:
            error.add_note(f"raised for {'.'.join(map(str, (*above, key)))!r}")
            raise
        if named is not None:
            container[key] = named


def _name_state(
    optimizer: Optimizer, content: Any, modules: Mapping[str, Mapping[int, str]]
) -> NamedState | None:
    numbers = _list_numbers(optimizer, content)
    if numbers is None:
        return None
    groups = name_groups(optimizer, modules)
    name_of = dict(zip(chain(*numbers), chain(*groups), strict=True))
    state = {name_of.get(key, key): entry for key, entry in content["state"].items()}
    if len(state) < len(content["state"]):
        both = sorted(name for name in name_of.values() if name in content["state"])
        raise DuplicateNameError(
            f"{type(optimizer).__name__}: {', '.join(both[:8])}: a parameter has the same name as another key of the "
            "optimizer's state; rename the parameter"
        )
    others = [entry for key, entry in content["state"].items() if key not in name_of]
    # What stands beside the parameters' state, as the slow weights of Lookahead, may depend on their numbers.
    beside = [entry for key, entry in content.items() if key not in {"state", "param_groups"}]
    beside += chain.from_iterable(each.values() if isinstance(each, Mapping) else (each,) for each in others)
    named = [{**group, "params": list(of)} for group, of in zip(content["param_groups"], groups, strict=True)]
    return NamedState(
        {**content, "state": state, "param_groups": named},
        groups,
        {name: number for number, name in name_of.items()},
        is_joint=isinstance(optimizer, LBFGS) or not has_scalars_only(beside),
    )


def _list_numbers(optimizer: Any, content: Any) -> list[list[int]] | None:
    """Return the numbers of each group's parameters; None if this isn't the form of torch's state_dict()."""
    groups = content.get("param_groups") if isinstance(content, Mapping) else None
    if not isinstance(groups, list) or not isinstance(content.get("state"), Mapping):
        return None
    numbers: list[Any] = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    if not all(isinstance(some, list) and {*map(type, some)} <= {int} for some in numbers):
        return None
    present = [len(group["params"]) for group in getattr(optimizer, "param_groups", ())]
    # torch allows the same parameter twice in a group. It has one number then, which can't get two names.
    n_distinct = len({*chain(*numbers)})
    return numbers if list(map(len, numbers)) == present and n_distinct == sum(present) else None


def _list_parameters(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _read_by_dcp(
    optimizer: Optimizer, modules: Mapping[str, nn.Module], names: Mapping[str, Mapping[int, str]]
) -> NamedState | None:
    """Read by torch's DCP the state of an optimizer of a module that FSDP1 wraps; None for all others.

    It has parts of flattened parameters, which only FSDP1 can name.
    """
    parameters = _list_parameters(optimizer)
    # FSDP1 marks what it has flattened. To look for its modules takes longer than all else here.
    if not any(getattr(p, "_fsdp_flattened", False) for p in parameters):
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel

    ids = set(map(id, parameters))
    # The largest module comes first: a part of it may be in the state as well.
    holders = (key for key in modules if ids <= names[key].keys())
    holder = min(holders, key=lambda key: (-len(names[key]), key), default=None)
    module = None if holder is None else modules[holder]
    if module is None or not FullyShardedDataParallel.fsdp_modules(module):
        raise UnsupportedValueError(
            f"{type(optimizer).__name__}: FullyShardedDataParallel has flattened its parameters, so they have no "
            "names: put the module that it trains into the state, or use fully_shard()"
        )
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    content: Any = get_optimizer_state_dict(module, optimizer)
    groups = [list(group["params"]) for group in content["param_groups"]]
    return NamedState(
        content, groups, {}, load=lambda loaded: set_optimizer_state_dict(module, optimizer, loaded)
    )
