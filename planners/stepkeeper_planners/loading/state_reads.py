"""Hold what one rank reads to fill its state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.load_request import Path
from stepkeeper_planners.loading.resharding import PieceRead
from stepkeeper_planners.state.per_rank import Resize, value_for

__all__ = ["StateReads", "ValueRead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRead:
    """One value of the state, and what it is made of: one stored one, or of a `PerRank` those of all saved ranks."""

    fqn: str
    stored_names: tuple[str, ...]
    within: Path = ()
    """The keys that lead to it in the stored value."""
    saved_world_size: int | None = None
    """Of a `PerRank`, how many ranks saved theirs."""

    def build_value(self, read: Mapping[str, object], resize: Resize | None, ranks: Ranks) -> object:
        """The state's value, from the stored ones by their names.

        Raises:
            LoadMismatchError: the stored container lacks the key.
        """
        if self.saved_world_size is not None:
            return value_for(resize, self.saved_world_size, [read[name] for name in self.stored_names], ranks)
        value = read[self.stored_names[0]]
        for key in self.within:
            value = self._below(value, key)
        return value

    def _below(self, value: Any, key: str | int) -> object:
        if isinstance(value, Mapping):
            # Names have the keys as text, whatever they were.
            for own, item in value.items():
                if str(own) == str(key):
                    return item
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            return value[key]
        raise LoadMismatchError(missing=[self.fqn], loaded="its tensors were loaded, its values were not")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReads:
    """What one rank reads to fill its state."""

    pieces: tuple[PieceRead, ...]
    """In the order of the state's tensors."""
    values: tuple[ValueRead, ...]
    skipped: tuple[str, ...]
    """Names of the state that are in no strict agreement with the checkpoint, and keep what they have."""
    unread: tuple[str, ...]
    """Names of the checkpoint that nothing in the state asks for."""
    tied_copies: tuple[PieceRead, ...] = ()
    """Of tied tensors, what further names have, where only their elements tell whether it is the same."""
