"""Hold the reads that fill one rank's state, and build the state's values from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.differences import Differences
from stepkeeper_planners.loading.fitted_target import FittedTarget
from stepkeeper_planners.loading.load_request import Path
from stepkeeper_planners.loading.resharding import PieceRead
from stepkeeper_planners.state.nesting import rebuild_nesting
from stepkeeper_planners.state.optimizer_groups import find_other_groups
from stepkeeper_planners.state.per_rank import Resize, resize_value

__all__ = ["StateReads", "ValueRead"]

_ROOT: Final = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRead:
    """One value of the state, and the stored values that it is made of.

    That is one stored value, for a `PerRank` those of all ranks that saved it, and for a list or dict that was saved
    entry by entry those entries.
    """

    fqn: str
    stored_names: tuple[str, ...]
    within: Path = ()
    """The keys that lead to it inside the stored value, if a dict or list around it was stored as one value."""
    saved_world_size: int | None = None
    """The number of ranks that saved theirs, if it is a `PerRank`."""
    paths: Mapping[str, Path] | None = None
    """If it was saved entry by entry: the keys in it that lead to each entry, by stored name. The marks of
    `encode_nesting` are among them: they show empty dicts, and keys that aren't text."""

    def build_value(self, read: Mapping[str, object], resize: Resize | None, ranks: Ranks) -> object:
        """Build the state's value for a rank from the stored values `read`, by name.

        Raises LoadMismatchError if the stored container lacks the key; SourceError if the checkpoint's keys contradict
        each other.
        """
        if self.saved_world_size is not None:
            values = [read[name] for name in self.stored_names]
            return resize_value(resize, self.saved_world_size, values, ranks)
        if self.paths is not None:
            leaves = {name: read[name] for name in self.stored_names}
            # A list can't be the root of what is rebuilt, so the value is put below one key.
            below = {name: (_ROOT, *path) for name, path in self.paths.items()}
            return rebuild_nesting(leaves, below, where=self.fqn)[_ROOT]
        value = read[self.stored_names[0]]
        for key in self.within:
            value = self._below(value, key)
        return value

    def _below(self, value: Any, key: str | int) -> object:
        if isinstance(value, Mapping):
            # Names hold keys of any type as text.
            for candidate, item in value.items():
                if str(candidate) == str(key):
                    return item
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            return value[key]
        # Only the value's own content shows this, and it is read after the tensors.
        raise LoadMismatchError(missing=[self.fqn], loaded="its tensors were loaded, its values were not")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReads:
    """Everything that one rank reads to fill its state."""

    pieces: tuple[PieceRead, ...]
    """The reads of tensors, in the order of the state's tensors."""
    values: tuple[ValueRead, ...]
    skipped: tuple[str, ...]
    """Names of the state that were not selected or not found; they keep their old content."""
    unread: tuple[str, ...]
    """Names of the checkpoint that nothing in the state asks for."""
    tied_copies: tuple[PieceRead, ...] = ()
    """Reads of a tied tensor's other names, if only their elements show whether the checkpoint has one tensor."""

    def build_values(
        self, read: Mapping[str, object], target: FittedTarget, ranks: Ranks, *, strict: bool
    ) -> tuple[dict[str, object], Differences]:
        """Build the state's values from the stored values, and list the differences that only these show.

        Args:
            read: the stored values that were read, by name.
            target: the state that is to be filled, with this checkpoint's names.
            ranks: the rank that gets the values.
            strict: whether a value that its stored container lacks is refused; else it keeps its present value.

        Returns:
            The values by their names in the state, and the differences. The values mean nothing if any is refused.
        """
        values: dict[str, object] = {}
        missing: list[str] = []
        for each in self.values:
            try:
                values[each.fqn] = each.build_value(read, target.flat.resizers.get(each.fqn), ranks)
            except LoadMismatchError as error:
                missing += error.missing
        # Options of an optimizer's param_groups, such as lr, are matched by group: they replace those read by name.
        options = target.assign_group_options(values, is_first_rank=ranks.rank == 0)
        values = {name: each for name, each in values.items() if name not in target.of_groups}
        values |= options.values
        # A strict load refuses the options that are left over. Another one only logs them, with those that it adds.
        return values, Differences(
            missing=tuple(sorted(missing)),
            mismatched=find_other_groups(target.state, target.filled.tree, values) | options.mismatched,
            left_over=options.left_over if strict else options.left_over | options.added,
            strict=strict,
        )
