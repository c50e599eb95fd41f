"""Save state that each rank has its own of, such as data loader positions and random number generators."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from stepkeeper_planners.errors import PerRankError
from stepkeeper_planners.geometry.layout import Ranks

__all__ = ["PerRank", "Resize", "list_stored_names", "parse_stored_name", "resize_value", "stored_name"]

Resize = Callable[[Sequence[object], Ranks], object]
"""Make this rank's value from the values that all ranks of another world size saved, in rank order."""

_STORED: Final = re.compile(r"(.*)@(0|[1-9][0-9]*)/([1-9][0-9]*)", re.DOTALL)


@dataclass(slots=True, eq=False)
class PerRank:
    """Mark a part of the state that differs between ranks: each rank saves its own, and gets its own back.

    Put it into the state in place of the value: `{"loader": PerRank(loader)}`. Each rank's value is stored as one
    entry. A load calls its load_state_dict(), or replaces `value`.

    Args:
        value: an object with state_dict() and load_state_dict(), or a tree of values, as it may be in a state. The
            tensors in it are on the CPU.
        resize: makes a rank's value when the world size has changed. It is called with the saved values of all ranks in
            rank order, and this process's `Ranks`. Its result is loaded as if this rank had saved it. Without it, a
            load with another world size raises PerRankError.

    Ranks: every rank has a PerRank under the same name.
    """

    value: object
    resize: Resize | None = None


def stored_name(fqn: str, ranks: Ranks) -> str:
    """Return the name under which this rank's value is stored."""
    return f"{fqn}@{ranks.rank}/{ranks.world_size}"


def parse_stored_name(name: str) -> tuple[str, int, int] | None:
    """Split a stored name into the name in the state, the rank and the world size; None if it isn't one."""
    parts = _STORED.fullmatch(name)
    if parts is None:
        return None
    rank, world_size = int(parts[2]), int(parts[3])
    return (parts[1], rank, world_size) if rank < world_size else None


def list_stored_names(fqn: str, resize: Resize | None, world_size: int, ranks: Ranks) -> tuple[str, ...]:
    """List the stored names that this rank reads: its own, or those of all ranks if the world size has changed.

    Raises PerRankError in that case if there is no `resize`.
    """
    if world_size == ranks.world_size:
        return (stored_name(fqn, ranks),)
    if resize is None:
        raise PerRankError(
            f"{fqn}: {world_size} ranks saved a value each, {ranks.world_size} load. Define how to make the new "
            "values: PerRank(value, resize=lambda values, ranks: …) gets the saved ones in the order of ranks and "
            f"returns that of ranks.rank of ranks.world_size; or leave {fqn} out of this load"
        )
    return tuple(stored_name(fqn, Ranks(rank=rank, world_size=world_size)) for rank in range(world_size))


def resize_value(resize: Resize | None, world_size: int, values: Sequence[object], ranks: Ranks) -> object:
    """Return this rank's value, from the values that were read under `list_stored_names`."""
    if world_size == ranks.world_size:
        (value,) = values
        return value
    assert resize is not None, "list_stored_names refuses this"
    return resize(values, ranks)
