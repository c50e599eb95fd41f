"""What a state asks of a checkpoint, from the state itself."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stepkeeper_planners import adapters
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.state.per_rank import Resize
from stepkeeper_planners.state.tree import FlatState

__all__ = ["LoadRequest", "Path", "build_load_request"]

Path = tuple[str | int, ...]
"""Keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What a state asks for, by flat name."""

    layouts: Sequence[TensorLayout]
    values: Mapping[str, Path] = field(default_factory=dict)
    """With the keys that lead to each."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied tensors → the name of the layout."""
    per_rank: Mapping[str, Resize | None] = field(default_factory=dict)
    """What each rank has of its own, with what makes it where the world size changed."""
    overlapping: Collection[str] = ()
    """Tensors of which several elements are one place in memory: they can't be filled."""
    containers: Collection[str] = ()
    """Names of the state's dicts and lists: older writers store one without tensors as a value."""


def build_load_request(flat: FlatState, ranks: Ranks) -> LoadRequest:
    """All names of the state, with the layouts of its tensors. Nothing is computed or moved.

    Raises:
        UnsupportedShardingError: a tensor's placement doesn't say which device holds what.
    """
    return LoadRequest(
        layouts=[adapters.describe(fqn, tensor, ranks) for fqn, tensor in flat.tensors.items()],
        values={fqn: flat.paths[fqn] for fqn in flat.values},
        aliases=flat.aliases,
        per_rank=flat.resizers,
        overlapping=frozenset(
            fqn for fqn, tensor in flat.tensors.items() if adapters.has_overlapping_elements(tensor)
        ),
        containers=frozenset(_containers(flat.tree, "")),
    )


def _containers(node: object, name: str) -> Iterator[str]:
    """The names of all dicts and lists under this one."""
    entries = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, part in entries:
        if isinstance(part, Mapping | list):
            below = f"{name}.{key}" if name else str(key)
            yield below
            yield from _containers(part, below)
