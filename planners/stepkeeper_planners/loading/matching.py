"""What a state asks for, held against what a checkpoint has: what is read for it, and all that differs."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.errors import LayoutError, LoadMismatchError, PerRankError
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.loading.differences import Differences
from stepkeeper_planners.loading.resharding import PieceRead, StoredTensor, pieces_of
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.state.per_rank import Resize, names_to_read, parse_stored_name, value_for

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a checkpoint has, by stored name."""

    tensors: Mapping[str, StoredTensor]
    values: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRead:
    """One value of the state, and what it is made of: one stored one, or of a `PerRank` those of all saved ranks."""

    fqn: str
    stored_names: tuple[str, ...]
    within: Path = ()
    """The keys that lead to it in the stored value."""
    saved_world_size: int | None = None
    """Of a `PerRank`, how many ranks saved theirs."""

    def value_from(self, read: Mapping[str, object], resize: Resize | None, ranks: Ranks) -> object:
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
    twins: tuple[PieceRead, ...] = ()
    """Of tied tensors, what further names have, where only their elements tell whether it is the same."""


def compare(
    wanted: Wanted,
    stored: Stored,
    ranks: Ranks,
    rules: LoadRules | None = None,
    owner: Ranks | None = None,
) -> tuple[StateReads, Differences]:
    """What is read, and what keeps it from being loaded; the reads mean nothing if there is such.

    `owner` says whose values of a `PerRank` these are, if that is another than who holds the tensors' parts.

    Every element of every local box is read exactly once; tied tensors and copies on this rank are read once too.
    """
    return _Comparison(
        wanted, stored, ranks, LoadRules() if rules is None else rules, owner or ranks
    ).result()


class _Comparison:
    """One comparison, as it goes."""

    def __init__(self, wanted: Wanted, stored: Stored, ranks: Ranks, rules: LoadRules, owner: Ranks) -> None:
        self._wanted, self._stored, self._ranks, self._rules = wanted, stored, ranks, rules
        self._owner = owner
        self._stored_values = set(stored.values)
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._mismatched: dict[str, str] = {}
        self._castable: list[str] = []
        self._skipped: list[str] = []
        self._pieces: list[PieceRead] = []
        self._twins: list[PieceRead] = []
        self._values: list[ValueRead] = []

    def result(self) -> tuple[StateReads, Differences]:
        names = {layout.fqn: [layout.fqn] for layout in self._wanted.layouts}
        for alias, first in self._wanted.aliases.items():
            names[first].append(alias)
        for layout in self._wanted.layouts:
            self._tensor(layout, names[layout.fqn])
        for fqn, path in self._wanted.values.items():
            if self._selected([fqn]):
                self._value(fqn, path)
        self._per_rank()
        unread = self._unread()
        self._idle_items()
        if not self._rules.strict:
            self._skipped += self._missing
        reads = StateReads(
            pieces=tuple(self._pieces),
            values=tuple(self._values),
            skipped=tuple(self._skipped),
            unread=tuple(unread),
            twins=tuple(self._twins),
        )
        return reads, self._differences(unread)

    def _differences(self, unread: list[str]) -> Differences:
        # A state that has nothing in common with a checkpoint was not meant to stay as it is.
        raised = self._rules.strict or (self._missing and not self._pieces and not self._values)
        return Differences(
            missing=tuple(sorted(self._missing)) if raised else (),
            unexpected=tuple(unread) if raised else (),
            mismatched=self._mismatched,
            castable=tuple(self._castable),
            asked=tuple(sorted({name.partition(".")[0] for name in self._asked()})),
            changing=tuple(self._changing(unread)) if raised else (),
        )

    def _changing(self, unread: Collection[str]) -> list[str]:
        """The top-level names below which state and checkpoint have values of different names, and only values."""
        if not self._missing or not unread:
            return []
        tensors = {layout.fqn for layout in self._wanted.layouts} | set(self._wanted.aliases)
        tensors |= set(self._stored.tensors)
        here, there, with_tensors = (
            {name.partition(".")[0] for name in names if "." in name}
            for names in (self._missing, unread, tensors)
        )
        return sorted((here & there) - with_tensors)

    def _asked(self) -> Iterator[str]:
        yield from (layout.fqn for layout in self._wanted.layouts)
        yield from self._wanted.aliases
        yield from self._wanted.values
        yield from self._wanted.per_rank

    def _selected(self, names: Sequence[str]) -> bool:
        if any(map(self._rules.selects, names)):
            return True
        self._skipped.extend(names)
        return False

    def _tensor(self, layout: TensorLayout, names: Sequence[str]) -> None:
        """A tied tensor is read from the first of its names that the load is about and the checkpoint has."""
        self._used.update(names)
        if not self._selected(names):
            return
        stored = [name for name in names if name in self._stored.tensors]
        selected = [name for name in stored if self._rules.selects(name)] or stored[:1]
        if not selected:
            self._no_tensor(names)
            return
        name, *others = selected
        found = self._stored.tensors[name]
        if layout.fqn in self._wanted.overlapping:
            self._mismatched[name] = (
                "expanded in the state: several of its elements are one place in memory. Load into a clone() of it"
            )
            return
        if reason := self._difference(layout, found):
            self._mismatched[name] = reason
            return
        if any(_differs(found, self._stored.tensors[other]) for other in others):
            self._mismatched[name] = (
                f"one tensor in the state, under {', '.join(names)}; several in the checkpoint"
            )
            return
        try:
            self._pieces.extend(pieces_of(layout, found, self._ranks, name))
            for other in others:
                if not _is_one(found, self._stored.tensors[other]):
                    self._twins.extend(pieces_of(layout, self._stored.tensors[other], self._ranks, other))
        except LayoutError as error:
            self._mismatched[name] = f"the checkpoint is damaged: {error}"

    def _no_tensor(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._stored_values:
                self._mismatched[name] = "a plain value in the checkpoint, a tensor in the state"
                return
        self._missing.append(names[0])

    def _difference(self, layout: TensorLayout, found: StoredTensor) -> str | None:
        if found.global_shape != layout.global_shape:
            return f"shape {found.global_shape} in the checkpoint, {layout.global_shape} in the state"
        if found.dtype == layout.dtype:
            return None
        reason = f"dtype {found.dtype} in the checkpoint, {layout.dtype} in the state"
        castable = torch.can_cast(dtype_of(found.dtype), dtype_of(layout.dtype))
        if castable and not self._rules.cast:
            self._castable.append(layout.fqn)
        if castable and self._rules.cast:
            return None
        if self._rules.cast:
            return f"{reason}: converted it would lose what only {found.dtype} can say"
        return reason

    def _value(self, fqn: str, path: Path) -> None:
        self._used.add(fqn)
        if fqn in self._stored_values:
            self._values.append(ValueRead(fqn=fqn, stored_names=(fqn,)))
        elif fqn in self._stored.tensors:
            self._mismatched[fqn] = "a tensor in the checkpoint, a plain value in the state"
        else:
            for length in range(len(path) - 1, 0, -1):
                container = ".".join(map(str, path[:length]))
                if container in self._stored_values:
                    self._used.add(container)
                    self._values.append(ValueRead(fqn=fqn, stored_names=(container,), within=path[length:]))
                    return
            self._missing.append(fqn)

    def _per_rank(self) -> None:
        worlds = _saved_worlds(self._stored_values)
        for fqn, resize in self._wanted.per_rank.items():
            self._used.add(fqn)
            if not self._selected([fqn]):
                continue
            if fqn in worlds:
                self._values_of_ranks(fqn, resize, worlds[fqn])
            elif fqn in self._stored_values or fqn in self._stored.tensors:
                self._mismatched[fqn] = (
                    "one for all ranks in the checkpoint, PerRank in the state. Load it without PerRank once"
                )
            else:
                self._missing.append(fqn)
        for fqn in self._wanted.values:
            if fqn in worlds and fqn in self._missing:
                self._missing.remove(fqn)
                self._mismatched[fqn] = (
                    "each rank's own in the checkpoint, one for all in the state. Put it into PerRank(value)"
                )

    def _values_of_ranks(self, fqn: str, resize: Resize | None, worlds: Mapping[int, set[int]]) -> None:
        """Of the world sizes under which it is stored, this one's goes first."""
        world_size = self._owner.world_size if self._owner.world_size in worlds else min(worlds)
        try:
            names = names_to_read(fqn, resize, world_size, self._owner)
        except PerRankError as error:
            self._mismatched[fqn] = str(error).removeprefix(f"{fqn}: ")
            return
        lacking = [name for name in names if name not in self._stored_values]
        if lacking:
            self._mismatched[fqn] = f"the checkpoint lacks {', '.join(lacking)}"
            return
        self._values.append(ValueRead(fqn=fqn, stored_names=names, saved_world_size=world_size))

    def _unread(self) -> list[str]:
        containers = set(self._wanted.containers)
        return sorted(
            name
            for name in (*self._stored.tensors, *self._stored.values)
            if name not in self._used and name not in containers and self._expects(name)
        )

    def _expects(self, stored_name: str) -> bool:
        """Whether the load is about it, and it is no rank's own value of something that was looked at."""
        parsed = parse_stored_name(stored_name)
        if parsed is not None and stored_name in self._stored_values:
            return parsed[0] not in self._used and self._rules.selects(parsed[0])
        return self._rules.selects(stored_name)

    def _idle_items(self) -> None:
        known = [*self._asked(), *self._stored.tensors, *self._stored.values]
        for pattern in self._rules.idle_items(known):
            self._mismatched[pattern] = (
                "asked for with items, and neither the state nor the checkpoint has it"
            )


def _differs(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether these are surely two tensors. Without knowing their bytes they may be one that was stored twice."""
    if (one.global_shape, one.dtype) != (other.global_shape, other.dtype):
        return True
    return one.data is not None and other.data is not None and one.data != other.data


def _is_one(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether these surely are one tensor, stored once."""
    return (one.data is not None and one.data == other.data) or (
        one.place is not None and one.place == other.place
    )


def _saved_worlds(stored_values: Collection[str]) -> dict[str, dict[int, set[int]]]:
    """For each name that ranks saved their own values of: the world sizes, and the ranks that are there."""
    worlds: dict[str, dict[int, set[int]]] = {}
    for name in stored_values:
        parsed = parse_stored_name(name)
        if parsed is not None:
            fqn, rank, world_size = parsed
            worlds.setdefault(fqn, {}).setdefault(world_size, set()).add(rank)
    return worlds
