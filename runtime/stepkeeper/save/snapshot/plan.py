"""Plan what this rank writes of a state, and where it lies in the region: all that follows from a state's structure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from stepkeeper.checkpoint import Structure, TensorOrder, ValueOrder
from stepkeeper.save.snapshot import device
from stepkeeper.save.snapshot.region import ALIGNMENT_BYTES
from stepkeeper_planners import adapters
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.saving.assignment import RankShare, TensorWrite, plan_save
from stepkeeper_planners.saving.fingerprints import digest_layouts, is_integer_tensor_on_host
from stepkeeper_planners.state.nesting import encode_nesting
from stepkeeper_planners.state.tree import FlatState

if TYPE_CHECKING:
    # At run time it would import torch_xla.
    from stepkeeper_planners.adapters.xla_pieces import ClonePlan

__all__ = ["Mine", "SnapshotPlan", "laid_out_behind", "plan_snapshot"]


Mine = list[tuple[int, TensorWrite]]
"""What this rank writes of one tensor, with its place among the plan's orders."""


@dataclass(frozen=True, kw_only=True)
class SnapshotPlan:
    """All that the saves of states of one structure have in common."""

    structure: Structure
    """As the companion is told it; its key is by which both processes know it."""

    layouts: tuple[TensorLayout, ...]
    writes: tuple[TensorWrite, ...]
    """For each of `orders`, which part of which of this rank's local shards it is."""

    values: tuple[str, ...]
    tensor_bytes: int
    """Of the region, for `orders`."""

    cuts: Mapping[str, "ClonePlan"]
    """How each XLA tensor is copied on its devices."""

    ordinary: frozenset[str]
    """The tensors that are copied as they are: on the CPU, whole, of torch's own classes."""

    whole_numbers: tuple[str, ...]
    """Those that the ranks compare by content."""

    @property
    def orders(self) -> tuple[TensorOrder, ...]:
        """What this rank writes of tensors, and where it lies in the region."""
        return self.structure.tensors

    @cached_property
    def layout_digests(self) -> dict[str, bytes]:
        """Digests of the layouts."""
        return digest_layouts(self.layouts)

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


def plan_snapshot(flat: FlatState, value_bytes: Mapping[str, int], *, ranks: Ranks) -> SnapshotPlan:
    """Plan what this rank writes of a state of which no computation is pending.

    `value_bytes` is how large each value counts as.

    Raises:
        UnsupportedShardingError: a tensor is placed in a way that can't be described, or that no rank knows alone.

    """
    cuts = device.cuts_of(flat.tensors)
    layouts = [
        device.describe_cut(fqn, tensor, cuts[fqn], ranks)
        if fqn in cuts
        else adapters.describe(fqn, tensor, ranks)
        for fqn, tensor in flat.tensors.items()
    ]
    _check_known_whole(layouts, ranks)
    plan = plan_save(layouts, value_bytes, ranks)
    orders, tensor_bytes = _laid_out(plan)
    return SnapshotPlan(
        structure=Structure.of(
            orders, aliases=flat.aliases, key_paths=flat.paths | encode_nesting(flat.tree)
        ),
        layouts=tuple(layouts),
        writes=plan.tensors,
        values=plan.values,
        tensor_bytes=tensor_bytes,
        cuts=cuts,
        ordinary=frozenset(fqn for fqn, tensor in flat.tensors.items() if adapters.is_ordinary(tensor)),
        whole_numbers=tuple(fqn for fqn, tensor in flat.tensors.items() if is_integer_tensor_on_host(tensor)),
    )


def laid_out_behind(plan: SnapshotPlan, blobs: Mapping[str, bytes]) -> tuple[tuple[ValueOrder, ...], int]:
    """Where the values lie, behind the tensors, and how large the region has to be."""
    start = plan.tensor_bytes
    values = []
    for fqn, blob in blobs.items():
        values.append(ValueOrder(fqn=fqn, start=start, length_bytes=len(blob)))
        start = _aligned(start + len(blob))
    return tuple(values), start


def _laid_out(plan: RankShare) -> tuple[tuple[TensorOrder, ...], int]:
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
