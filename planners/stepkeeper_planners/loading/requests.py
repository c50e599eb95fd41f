"""What a state asks of a checkpoint, from the state itself."""

from collections.abc import Iterator, Mapping

from stepkeeper_planners import adapters
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.matching import Wanted
from stepkeeper_planners.state.tree import FlatState


def wanted_of(flat: FlatState, ranks: Ranks) -> Wanted:
    """All names of the state, with the layouts of its tensors. Nothing is computed or moved.

    Raises:
        UnsupportedShardingError: a tensor's placement doesn't say which device holds what.
    """
    return Wanted(
        layouts=[adapters.describe(fqn, tensor, ranks) for fqn, tensor in flat.tensors.items()],
        values={fqn: flat.paths[fqn] for fqn in flat.values},
        aliases=flat.aliases,
        per_rank=flat.resizers,
        overlapping=frozenset(fqn for fqn, tensor in flat.tensors.items() if adapters.overlaps(tensor)),
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
