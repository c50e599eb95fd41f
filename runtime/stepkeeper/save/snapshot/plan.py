"""What this rank writes of a state, and where it lies in the region. Made once for states that are built alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from stepkeeper.checkpoint import TensorOrder, ValueOrder
from stepkeeper.save.snapshot import device
from stepkeeper.save.snapshot.region import ALIGNMENT_BYTES
from stepkeeper_planners import adapters
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.saving.assignment import LARGE_VALUE_BYTES, SavePlan, TensorWrite, plan_save
from stepkeeper_planners.saving.fingerprints import form_digests, has_whole_numbers
from stepkeeper_planners.state.gatherer import Gathered
from stepkeeper_planners.state.tree import FlatState
from stepkeeper_planners.state.values import content_bytes

if TYPE_CHECKING:
    # At run time it would import torch_xla.
    from stepkeeper_planners.adapters.xla_pieces import Cut

__all__ = ["Mine", "Planner", "SnapshotPlan", "laid_out_behind"]


Mine = list[tuple[int, TensorWrite]]
"""What this rank writes of one tensor, with its place among the plan's orders."""


@dataclass(frozen=True, kw_only=True)
class SnapshotPlan:
    """Good for all states with the same names, shapes, dtypes and placements."""

    layouts: tuple[TensorLayout, ...]
    orders: tuple[TensorOrder, ...]
    writes: tuple[TensorWrite, ...]
    """For each of `orders`, which part of which of this rank's local shards it is."""

    values: tuple[str, ...]
    tensor_bytes: int
    """Of the region, for `orders`."""

    cuts: Mapping[str, "Cut"]
    """How each XLA tensor is copied on its devices."""

    ordinary: frozenset[str]
    """The tensors that are copied as they are: on the CPU, whole, of torch's own classes."""

    whole_numbers: tuple[str, ...]
    """Those that the ranks compare by content."""

    @cached_property
    def forms(self) -> dict[str, bytes]:
        """Digests of the layouts."""
        return form_digests(self.layouts)

    @cached_property
    def mine(self) -> dict[str, Mine]:
        """By tensor, in the order of the plan, which has the parts of a tensor together."""
        return {
            fqn: list(mine) for fqn, mine in groupby(enumerate(self.writes), key=lambda pair: pair[1].fqn)
        }

    @cached_property
    def by_box(self) -> dict[str, dict[Box, int]]:
        """`mine`, where one knows the box of all of it."""
        return {fqn: {write.box: index for index, write in mine} for fqn, mine in self.mine.items()}

    @cached_property
    def whole(self) -> list[tuple[int, str]]:
        """The ordinary tensors that this rank writes whole, each with its place among the orders."""
        return [
            (index, write.fqn)
            for index, write in enumerate(self.writes)
            if write.fqn in self.ordinary and write.box.sizes == write.global_shape
        ]

    @cached_property
    def parts(self) -> dict[str, Mine]:
        """Of the other ones that are not copied on devices, as `mine`."""
        whole = {fqn for _, fqn in self.whole}
        return {fqn: mine for fqn, mine in self.mine.items() if fqn not in self.cuts and fqn not in whole}


class Planner:
    """Plans the saves of one rank; remembers the last plan."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._key: object = None
        self._plan: SnapshotPlan | None = None

    def plan(self, state: Gathered) -> SnapshotPlan:
        """What this rank writes of a state of which no computation is pending.

        Raises:
            UnsupportedValueError: a value is of a type that is not stored; it names the key.
            UnsupportedShardingError: a tensor is placed in a way that can't be described, or that no rank knows alone.

        """
        sizes = {fqn: content_bytes(value) for fqn, value in state.flat.values.items()}
        # A rank alone writes all values, however large they are.
        alone = self._ranks.world_size == 1
        weights = {fqn: 0 if alone or size < LARGE_VALUE_BYTES else size for fqn, size in sizes.items()}
        key = (state.build.structures, weights)
        if self._plan is None or key != self._key:
            self._plan = self._made(state.flat, weights)
            self._key = key
        return self._plan

    def _made(self, flat: FlatState, value_bytes: Mapping[str, int]) -> SnapshotPlan:
        cuts = device.cuts_of(flat.tensors)
        layouts = [
            device.describe_cut(fqn, tensor, cuts[fqn], self._ranks)
            if fqn in cuts
            else adapters.describe(fqn, tensor, self._ranks)
            for fqn, tensor in flat.tensors.items()
        ]
        _check_known_whole(layouts, self._ranks)
        plan = plan_save(layouts, value_bytes, self._ranks)
        orders, tensor_bytes = _laid_out(plan)
        return SnapshotPlan(
            layouts=tuple(layouts),
            orders=orders,
            writes=plan.tensors,
            values=plan.values,
            tensor_bytes=tensor_bytes,
            cuts=cuts,
            ordinary=frozenset(fqn for fqn, tensor in flat.tensors.items() if adapters.is_ordinary(tensor)),
            whole_numbers=tuple(fqn for fqn, tensor in flat.tensors.items() if has_whole_numbers(tensor)),
        )


def laid_out_behind(plan: SnapshotPlan, blobs: Mapping[str, bytes]) -> tuple[tuple[ValueOrder, ...], int]:
    """Where the values lie, behind the tensors, and how large the region has to be."""
    start = plan.tensor_bytes
    values = []
    for fqn, blob in blobs.items():
        values.append(ValueOrder(fqn=fqn, start=start, length_bytes=len(blob)))
        start = _aligned(start + len(blob))
    return tuple(values), start


def _laid_out(plan: SavePlan) -> tuple[tuple[TensorOrder, ...], int]:
    start = 0
    tensors = []
    for write in plan.tensors:
        tensors.append(
            TensorOrder(
                fqn=write.fqn,
                dtype=write.dtype,
                global_shape=write.global_shape,
                offsets=write.box.offsets,
                sizes=write.box.sizes,
                start=start,
            )
        )
        start = _aligned(start + write.size_bytes)
    return tuple(tensors), start


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _check_known_whole(layouts: Sequence[TensorLayout], ranks: Ranks) -> None:
    """Who writes what is decided by every rank alone, so each must know where all of a tensor lies."""
    partial = next((layout.fqn for layout in layouts if not layout.complete), None)
    if partial is not None and ranks.world_size > 1:
        raise UnsupportedShardingError(
            f"{partial}: this rank knows only its own part of it, and CheckpointManager saves tensors whose placement "
            "every rank knows whole, such as a DTensor. Make it one, or save it with torch.distributed.checkpoint and "
            "SPMDSavePlanner"
        )
