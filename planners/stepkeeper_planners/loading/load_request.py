"""Collect the names, layouts and values that a state requests from a checkpoint."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from stepkeeper_planners import adapters
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.state.nesting import encode_nesting
from stepkeeper_planners.state.per_rank import Resize
from stepkeeper_planners.state.resizable import Resizable, find_resizable
from stepkeeper_planners.state.scalars import has_plain_leaves_only
from stepkeeper_planners.state.tree import FlatState, Path, flatten_state

__all__ = ["LoadRequest", "LoadTarget", "Path", "build_load_request"]


class LoadTarget:
    """A rank's state that is to be filled, as it is before the load.

    state_dict() is called once, however many checkpoints are tried, and also if it fails. It has side effects in some
    objects: a data loader makes its iterator. If it exchanges data between ranks, a second call in one rank would hang.
    """

    def __init__(self, state: Mapping[str, object]) -> None:
        """Hold a nested state, whose tensors and containers are filled in place. Nothing in it is called yet."""
        self.state: Final = state
        self.of_groups: frozenset[str] = frozenset()
        """The checkpoint's names of optimizers' groups: all are requested, whether or not the state has them."""

        self._failure: Exception | None = None

    @cached_property
    def flat(self) -> FlatState:
        """The leaves of the state. The first access calls state_dict() of every Stateful: see `flatten_state`.

        If that fails, each later access raises the same error.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return flatten_state(self.state)
        except Exception as error:
            self._failure = error
            raise

    @cached_property
    def resizable(self) -> Mapping[str, Resizable]:
        """The parts that may get another number of items than they have now, by name."""
        return find_resizable(self.state, self.flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Everything that a state requests, by flat name."""

    layouts: Sequence[TensorLayout]
    values: Mapping[str, Path] = field(default_factory=dict)
    """The values that aren't tensors, with the keys that lead to each."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied tensors, each with the name of its layout."""
    per_rank: Mapping[str, Resize | None] = field(default_factory=dict)
    """The `PerRank` names, each with the function that converts its values if the world size changed."""
    overlapping: Collection[str] = ()
    """Tensors with several elements in one place of memory, which can't be filled."""
    containers: Collection[str] = ()
    """The names of the state's dicts and lists. Older writers store one without tensors as a single value."""
    resizable: Mapping[str, Resizable] = field(default_factory=dict)
    of_groups: frozenset[str] = frozenset()
    """The names of optimizers' groups, which are requested even if the rules don't select them."""
    marks: Collection[str] = ()
    """The marks of the state's keys and empty dicts, as `encode_nesting` names them."""


def build_load_request(
    target: LoadTarget, ranks: Ranks, shardings: Mapping[str, str] | None = None
) -> LoadRequest:
    """Describe everything that the state requests. No tensor is computed or moved.

    Args:
        target: the state.
        ranks: this rank among those that load.
        shardings: the shardings that tensors get when they are filled, by name; see `choose_shardings`.

    Raises:
        UnsupportedShardingError: a tensor's placement doesn't determine which device holds what.
        DuplicateNameError: two keys of a dict have one name.
    """
    flat = target.flat
    return LoadRequest(
        layouts=adapters.describe_all(flat.tensors, ranks, shardings),
        values={fqn: flat.paths[fqn] for fqn in flat.values},
        aliases=flat.aliases,
        per_rank=flat.resizers,
        overlapping=frozenset(
            fqn for fqn, tensor in flat.tensors.items() if adapters.has_overlapping_elements(tensor)
        ),
        containers=frozenset(_containers(flat.tree, "")),
        resizable=target.resizable,
        of_groups=target.of_groups,
        marks=encode_nesting(flat.tree, flat.paths).keys(),
    )


def _containers(node: object, name: str) -> Iterator[str]:
    """Yield the names of all dicts and lists below this one."""
    entries: Iterable[tuple[Any, object]] = ()
    # Dicts of tensors only, which may be long, aren't searched.
    if isinstance(node, Mapping) and not has_plain_leaves_only(node.values()):
        entries = node.items()
    elif isinstance(node, list):
        entries = enumerate(node)
    for key, part in entries:
        if isinstance(part, Mapping | list):
            below = f"{name}.{key}" if name else str(key)
            yield below
            yield from _containers(part, below)
