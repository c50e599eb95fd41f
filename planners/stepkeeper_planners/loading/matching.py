"""Match the names that a state requests with those that a checkpoint has; list the reads and the differences."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.errors import LayoutError, PerRankError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.loading.differences import Differences, list_with_state
from stepkeeper_planners.loading.load_request import LoadRequest, Path
from stepkeeper_planners.loading.resharding import PieceRead, plan_tensor_reads
from stepkeeper_planners.loading.resizing import match_resizable
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.state_reads import StateReads, ValueRead
from stepkeeper_planners.loading.stored_state import StoredState, StoredTensor
from stepkeeper_planners.state.parameter_names import find_optimizers
from stepkeeper_planners.state.per_rank import Resize, list_stored_names, parse_stored_name


def compare(
    request: LoadRequest,
    stored: StoredState,
    ranks: Ranks,
    rules: LoadRules | None = None,
    owner: Ranks | None = None,
) -> tuple[StateReads, Differences]:
    """Plan the reads of one rank, and list the differences that prevent the load.

    Every element of every local box is read exactly once, even if the tensor is tied or this rank has several copies.

    Args:
        request: the names, layouts and values of the state.
        stored: the content of the checkpoint.
        ranks: this process, among those that hold the parts of the tensors.
        rules: which names are loaded, and how strictly; None for all names, strictly.
        owner: the rank whose `PerRank` values are loaded; None for that of `ranks`.

    Returns:
        The reads, and the differences. The reads mean nothing if there are differences.
    """
    return _Comparison(request, stored, ranks, LoadRules() if rules is None else rules, owner or ranks).run()


class _Comparison:
    """Compare one request with one checkpoint, and collect the reads and the differences."""

    def __init__(
        self, request: LoadRequest, stored: StoredState, ranks: Ranks, rules: LoadRules, owner: Ranks
    ) -> None:
        self._request, self._stored, self._ranks, self._rules = request, stored, ranks, rules
        self._owner = owner
        self._stored_values = set(stored.values)
        self._used: set[str] = set()
        """The names of the state's entries, and the other stored names that are read: none of them is unread."""
        self._missing: list[str] = []
        self._mismatched: dict[str, str] = {}
        self._castable: list[str] = []
        self._skipped: list[str] = []
        self._pieces: list[PieceRead] = []
        self._tied_copies: list[PieceRead] = []
        self._values: list[ValueRead] = []
        self._local_boxes: dict[int, Mapping[int, Box]] = {}
        """This rank's boxes, by the identity of the chunks of a layout."""

    def run(self) -> tuple[StateReads, Differences]:
        aliases: dict[str, list[str]] = {}
        for alias, first in self._request.aliases.items():
            aliases.setdefault(first, []).append(alias)
        for layout in self._request.layouts:
            if not self._read_alike(layout, aliases):
                self._match_tensor(layout, [layout.fqn, *aliases.get(layout.fqn, ())])
        loaded_whole = self._match_resizable()
        for fqn, path in self._request.values.items():
            if fqn not in loaded_whole and self._select([fqn]):
                self._match_value(fqn, path)
        self._match_per_rank()
        unread = self._list_unread()
        self._report_unmatched_items()
        if not self._rules.strict:
            self._skipped += self._missing
        reads = StateReads(
            pieces=tuple(self._pieces),
            values=tuple(self._values),
            skipped=tuple(self._skipped),
            unread=tuple(unread),
            tied_copies=tuple(self._tied_copies),
        )
        return reads, self._build_differences(unread)

    def _build_differences(self, unread: list[str]) -> Differences:
        if not (self._missing or self._mismatched or unread):
            return Differences(strict=self._rules.strict)
        # With nothing in common, strict=False would load nothing, which is never intended.
        of_groups = self._request.of_groups
        reads_any = bool(self._pieces) or any(each.fqn not in of_groups for each in self._values)
        strict = self._rules.strict or bool(self._missing and not reads_any)
        names = (*self._stored.tensors, *self._stored.values, *self._requested_names()) if unread else ()
        optimizers, name_in_state = find_optimizers(names), self._rules.name_in_state
        return Differences(
            missing=tuple(sorted(self._missing)),
            unexpected=tuple(unread),
            strict=strict,
            mismatched={name_in_state(name): reason for name, reason in self._mismatched.items()},
            castable=tuple(map(name_in_state, self._castable)),
            asked=tuple(sorted({name.partition(".")[0] for name in self._requested_names()})),
            changing=tuple(self._find_changing(unread)) if strict else (),
            optimizers=tuple(sorted(optimizers)),
            primed=tuple(sorted({n for n, _ in list_with_state(self._requested_names(), optimizers)})),
        )

    def _find_changing(self, unread: Collection[str]) -> list[str]:
        """Return the top-level names below which both sides have only values, and under different names."""
        if not self._missing or not unread:
            return []
        tensors = {layout.fqn for layout in self._request.layouts} | set(self._request.aliases)
        tensors |= set(self._stored.tensors)
        here, there, with_tensors = (
            {name.partition(".")[0] for name in names if "." in name}
            for names in (self._missing, unread, tensors)
        )
        return sorted((here & there) - with_tensors)

    def _requested_names(self) -> Iterator[str]:
        yield from (layout.fqn for layout in self._request.layouts)
        yield from self._request.aliases
        yield from self._request.values
        yield from self._request.per_rank

    def _select(self, names: Sequence[str]) -> bool:
        """Return whether to load an entry with these names. If not, note that it is skipped."""
        if any(map(self._rules.selects, names)) or not self._request.of_groups.isdisjoint(names):
            return True
        self._skipped.extend(names)
        return False

    def _read_alike(self, layout: TensorLayout, aliases: Collection[str]) -> bool:
        """Read a tensor that isn't tied, and is alike in the checkpoint, as most are. Return False for another."""
        name, found = layout.fqn, self._stored.tensors.get(layout.fqn)
        if (
            found is None
            or name in aliases
            or name in self._request.overlapping
            or not self._rules.selects_all
        ):
            return False
        if found.dtype != layout.dtype or found.global_shape != layout.global_shape:
            return False
        self._used.add(name)
        self._read(layout, [name])
        return True

    def _match_tensor(self, layout: TensorLayout, names: Sequence[str]) -> None:
        """Read a tied tensor from the first of its names that the rules select and the checkpoint has."""
        self._used.update(names)
        if not self._rules.selects_all and not self._select(names):
            return
        stored = [name for name in names if name in self._stored.tensors]
        selected = stored
        if not self._rules.selects_all:
            # If the rules select only a name that isn't stored, the tensor is read from the first that is.
            selected = [name for name in stored if self._rules.selects(name)] or stored[:1]
        if not selected:
            self._report_missing_tensor(names)
            return
        name, *others = selected
        found = self._stored.tensors[name]
        if layout.fqn in self._request.overlapping:
            self._mismatched[name] = (
                "expanded in the state: several of its elements share one place in memory. Load into a clone() of it"
            )
            return
        if reason := self._explain_difference(layout, found):
            self._mismatched[name] = reason
            return
        if any(found.differs_from(self._stored.tensors[other]) for other in others):
            self._mismatched[name] = (
                f"one tensor in the state, under {', '.join(names)}; several in the checkpoint"
            )
            return
        self._read(layout, selected)

    def _read(self, layout: TensorLayout, names: Sequence[str]) -> None:
        """Read a tensor from the first of these names in the checkpoint, and compare it with further tensors there."""
        name, *others = names
        found, local = self._stored.tensors[name], self._list_local_boxes(layout)
        try:
            self._pieces.extend(plan_tensor_reads(layout.fqn, local, found, name))
            for other in others:
                if not found.is_same_as(self._stored.tensors[other]):
                    self._tied_copies.extend(
                        plan_tensor_reads(layout.fqn, local, self._stored.tensors[other], other)
                    )
        except LayoutError as error:
            self._mismatched[name] = f"the checkpoint is damaged: {error}"

    def _list_local_boxes(self, layout: TensorLayout) -> Mapping[int, Box]:
        """Return this rank's boxes of a tensor. Many tensors share the chunks of their layouts."""
        key = id(layout.chunks)
        if key not in self._local_boxes:
            self._local_boxes[key] = layout.local_boxes(self._ranks.rank)
        return self._local_boxes[key]

    def _report_missing_tensor(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._stored_values:
                self._mismatched[name] = "a plain value in the checkpoint, a tensor in the state"
                return
        self._missing.append(names[0])

    def _explain_difference(self, layout: TensorLayout, found: StoredTensor) -> str | None:
        if found.global_shape != layout.global_shape:
            return f"shape {found.global_shape} in the checkpoint, {layout.global_shape} in the state"
        if found.dtype == layout.dtype:
            return None
        reason = f"dtype {found.dtype} in the checkpoint, {layout.dtype} in the state"
        castable = torch.can_cast(dtype_of(found.dtype), dtype_of(layout.dtype))
        if not castable:
            lost = f": conversion would lose what only {found.dtype} can represent"
            return reason + (lost if self._rules.cast else "")
        if self._rules.cast:
            return None
        self._castable.append(layout.fqn)
        return reason

    def _match_value(self, fqn: str, path: Path) -> None:
        """Read a value from its own name, or from a dict or list around it that was stored as one value."""
        self._used.add(fqn)
        if fqn in self._stored_values:
            self._values.append(ValueRead(fqn=fqn, stored_names=(fqn,)))
        elif fqn in self._stored.tensors:
            self._mismatched[fqn] = "a tensor in the checkpoint, a plain value in the state"
        else:
            # From the innermost container to the outermost.
            for length in range(len(path) - 1, 0, -1):
                container = ".".join(map(str, path[:length]))
                if container in self._stored_values:
                    self._used.add(container)
                    self._values.append(ValueRead(fqn=fqn, stored_names=(container,), within=path[length:]))
                    return
            self._missing.append(fqn)

    def _match_resizable(self) -> set[str]:
        """Read lists and dicts whose items may differ from the saved ones. Return the state's names in them."""
        found = match_resizable(self._request, self._stored, self._rules)
        for read in found.reads:
            self._values.append(read)
            self._used.update(read.stored_names)
        self._mismatched.update(found.mismatched)
        return found.covered

    def _match_per_rank(self) -> None:
        worlds = self._stored.saved_world_sizes()
        for fqn, resize in self._request.per_rank.items():
            self._used.add(fqn)
            if not self._select([fqn]):
                continue
            if fqn in worlds:
                self._match_rank_values(fqn, resize, worlds[fqn])
            elif fqn in self._stored_values or fqn in self._stored.tensors:
                self._mismatched[fqn] = (
                    "one for all ranks in the checkpoint, PerRank in the state. Load it once without PerRank"
                )
            else:
                self._missing.append(fqn)
        for fqn in self._request.values:
            if fqn in worlds and fqn in self._missing:
                self._missing.remove(fqn)
                self._mismatched[fqn] = (
                    "each rank's own in the checkpoint, one for all in the state. Put it into PerRank(value)"
                )

    def _match_rank_values(self, fqn: str, resize: Resize | None, worlds: Mapping[int, set[int]]) -> None:
        """Read the `PerRank` values of this world size if there are any, else those of the smallest one."""
        world_size = self._owner.world_size if self._owner.world_size in worlds else min(worlds)
        try:
            names = list_stored_names(fqn, resize, world_size, self._owner)
        except PerRankError as error:
            self._mismatched[fqn] = str(error).removeprefix(f"{fqn}: ")
            return
        lacking = [name for name in names if name not in self._stored_values]
        if lacking:
            self._mismatched[fqn] = f"the checkpoint lacks {', '.join(lacking)}"
            return
        self._values.append(ValueRead(fqn=fqn, stored_names=names, saved_world_size=world_size))

    def _list_unread(self) -> list[str]:
        """List the checkpoint's names that should have been read, and were not."""
        # A list or dict that is stored as one value is read for the values in it.
        containers = set(self._request.containers)
        repeating = self._stored.further  # names that only repeat an option of an optimizer's group
        for name in self._used & repeating.keys():
            # The state has a group's options by parameter, so this read stands for the group's own entries too.
            self._used |= {repeating[name], f"{repeating[name].rpartition('.')[0]}.params"}
        self._used |= repeating.keys()
        return sorted(
            name
            for name in (*self._stored.tensors, *self._stored.values)
            if name not in self._used and name not in containers and self._is_expected(name)
        )

    def _is_expected(self, stored_name: str) -> bool:
        """Return whether the name should be read: the rules select it, and it isn't another rank's `PerRank` value."""
        parsed = parse_stored_name(stored_name)
        if parsed is not None and stored_name in self._stored_values:
            return parsed[0] not in self._used and self._rules.selects(parsed[0])
        return self._rules.selects(stored_name)

    def _report_unmatched_items(self) -> None:
        if not self._rules.items:
            return
        names = [*self._requested_names(), *self._stored.tensors, *self._stored.values]
        for pattern in self._rules.find_unmatched_items(names):
            self._mismatched[pattern] = "selected by items=, but neither the state nor the checkpoint has it"
