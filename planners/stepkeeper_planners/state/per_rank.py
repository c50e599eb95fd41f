"""State that every rank has its own of: where a data loader stands, a rank's random number generators."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from stepkeeper_planners.errors import PerRankError
from stepkeeper_planners.geometry.layout import Ranks

__all__ = ["PerRank", "Resize", "list_stored_names", "parse_stored_name", "resize_value", "stored_name"]

Resize = Callable[[Sequence[object], Ranks], object]
"""Makes this rank's value of the values that all ranks of another world size saved, in the order of ranks."""

_STORED: Final = re.compile(r"(.*)@(0|[1-9][0-9]*)/([1-9][0-9]*)", re.DOTALL)


@dataclass(slots=True, eq=False)
class PerRank:
    """A box for what differs between ranks: each saves its own, and gets its own back.

    The value is an object with state_dict() and load_state_dict(), or a tree of values as they may stand in a
    state; the tensors in it are on the CPU. It is stored as one piece, and changed by a load.
    """

    value: object
    resize: Resize | None = None
    """Called where the world size changed. What it returns is loaded as if this rank had saved it."""


def stored_name(fqn: str, ranks: Ranks) -> str:
    """The name under which this rank's value is stored."""
    return f"{fqn}@{ranks.rank}/{ranks.world_size}"


def parse_stored_name(name: str) -> tuple[str, int, int] | None:
    """The name in the state, the rank and the world size; None if no rank's own value has such a name."""
    parts = _STORED.fullmatch(name)
    if parts is None:
        return None
    rank, world_size = int(parts[2]), int(parts[3])
    return (parts[1], rank, world_size) if rank < world_size else None


def list_stored_names(fqn: str, resize: Resize | None, world_size: int, ranks: Ranks) -> tuple[str, ...]:
    """The stored names that this rank needs: its own, or all where `world_size`, the saved one, is another.

    Raises:
        PerRankError: it is another, and nothing says how to make one value of several.
    """
    if world_size == ranks.world_size:
        return (stored_name(fqn, ranks),)
    if resize is None:
        raise PerRankError(
            f"{fqn}: {world_size} ranks saved a value each, {ranks.world_size} load. Say how to make the new values: "
            "PerRank(value, resize=lambda values, ranks: …) gets the saved ones in the order of ranks and returns "
            f"that of ranks.rank of ranks.world_size; or leave {fqn} out of this load"
        )
    return tuple(stored_name(fqn, Ranks(rank=rank, world_size=world_size)) for rank in range(world_size))


def resize_value(resize: Resize | None, world_size: int, values: Sequence[object], ranks: Ranks) -> object:
    """This rank's value, from what was read under `list_stored_names`."""
    if world_size == ranks.world_size:
        (value,) = values
        return value
    assert resize is not None, "list_stored_names refuses this"
    return resize(values, ranks)
