"""Plan what this rank writes of a state, and where it lies in the region, from the state's structure alone."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from stepkeeper.checkpoint.manifest import Shardings
from stepkeeper.checkpoint.orders import Structure, TensorOrder, ValueOrder
from stepkeeper.save.snapshot import device_pieces
from stepkeeper.save.snapshot.region import ALIGNMENT_BYTES
from stepkeeper_planners import adapters
from stepkeeper_planners.adapters.open_shardings import collect_shardings, count_devices
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.saving.assignment import RankShare, TensorWrite, plan_save
from stepkeeper_planners.saving.copies import HeldCopies, find_copies
from stepkeeper_planners.saving.differing_copies import find_buffers, keep_first_copies
from stepkeeper_planners.saving.fingerprints import digest_layouts
from stepkeeper_planners.state.nesting import encode_nesting
from stepkeeper_planners.state.tree import FlatState, pick_at

if TYPE_CHECKING:
    # At run time it would import torch_xla.
    from stepkeeper_planners.adapters.xla_pieces import ClonePlan

__all__ = ["SnapshotPlan", "TensorWrites", "place_values", "plan_snapshot"]


TensorWrites = list[tuple[int, TensorWrite]]
"""This rank's writes of one tensor, each with its index among the plan's orders."""


@dataclass(frozen=True, kw_only=True)
class SnapshotPlan:
    """A plan that the saves of all states of one structure share."""

    structure: Structure
    """The structure as the companion gets it. Both processes identify it by its key."""

    layouts: tuple[TensorLayout, ...]
    writes: tuple[TensorWrite, ...]
    """For each of `orders`, the part of this rank's local shards that it takes."""

    values: tuple[str, ...]
    names: frozenset[str]
    """The names of everything in the state, of all ranks' shares."""

    per_rank: frozenset[str]
    """The names of the values that each rank has separately."""

    tensor_bytes: int
    """Size in the region of all `orders`."""

    clones: Mapping[str, "ClonePlan"]
    """The plan of each XLA tensor's copy on its devices."""

    left_open: tuple[str, ...]
    """Names of the XLA tensors that have no sharding. Copying must not give them one."""

    places: Mapping[str, int]
    """The place of each tensor among those of the state."""

    ordinary_tensors: frozenset[str]
    """Tensors that are copied as they are: on the CPU, whole, of torch's own classes."""

    copies: tuple[HeldCopies, ...]
    """What this rank and others hold copies of, and compare."""

    @property
    def orders(self) -> tuple[TensorOrder, ...]:
        """The boxes of tensors that this rank writes, and where each lies in the region."""
        return self.structure.tensors

    @cached_property
    def layout_digests(self) -> dict[str, bytes]:
        """Digests of the layouts, by tensor."""
        return digest_layouts(self.layouts)

    @cached_property
    def writes_by_fqn(self) -> dict[str, TensorWrites]:
        """This rank's writes by tensor, in the plan's order. That keeps a tensor's writes together, for groupby."""
        return {
            fqn: list(mine) for fqn, mine in groupby(enumerate(self.writes), key=lambda pair: pair[1].fqn)
        }

    @cached_property
    def index_by_box(self) -> dict[str, dict[Box, int]]:
        """For each tensor, the index of each write, by its box."""
        return {fqn: {write.box: index for index, write in mine} for fqn, mine in self.writes_by_fqn.items()}

    @cached_property
    def whole_tensors(self) -> dict[str, int]:
        """The ordinary tensors that this rank writes whole, each with its index among the orders."""
        return {
            write.fqn: index
            for index, write in enumerate(self.writes)
            if write.fqn in self.ordinary_tensors and write.box.sizes == write.global_shape
        }

    @cached_property
    def pick_whole(self) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        """Picks `whole_tensors` from all tensors of the state, in order."""
        return pick_at([self.places[fqn] for fqn in self.whole_tensors])

    @cached_property
    def partial_writes(self) -> dict[str, TensorWrites]:
        """Writes, by tensor, of the tensors that are neither in `whole_tensors` nor copied on devices."""
        whole = self.whole_tensors
        if not self.clones and len(whole) == len(self.writes):
            return {}
        return {
            fqn: mine
            for fqn, mine in self.writes_by_fqn.items()
            if fqn not in self.clones and fqn not in whole
        }


def plan_snapshot(
    flat: FlatState,
    value_bytes: Mapping[str, int],
    *,
    ranks: Ranks,
    first: Collection[str] = (),
) -> SnapshotPlan:
    """Plan what this rank writes of a state. No computation may be pending on it.

    `value_bytes` has the size that each value counts as. For `first` see `keep_first_copies`. Raises
    UnsupportedShardingError if a tensor's placement can't be described, or a rank knows only part of it.
    """
    clones = device_pieces.plan_clones(flat.tensors)
    others = (
        {fqn: each for fqn, each in flat.tensors.items() if fqn not in clones} if clones else flat.tensors
    )
    layouts = adapters.describe_all(others, ranks)
    # Copies on devices lie differently from their tensors.
    layouts += (
        device_pieces.describe_clone(fqn, flat.tensors[fqn], clone, ranks) for fqn, clone in clones.items()
    )
    _check_known_whole(layouts, ranks)
    if ranks.world_size > 1:
        layouts = keep_first_copies(layouts, first, find_buffers(flat))
    plan = plan_save(layouts, value_bytes, ranks)
    orders, tensor_bytes = _place_tensors(plan)
    shardings = collect_shardings(flat.tensors)
    return SnapshotPlan(
        structure=Structure(
            tensors=orders,
            aliases=dict(flat.aliases),
            shardings=Shardings(
                n_devices=count_devices() if shardings else 0,
                by_name={fqn: text for fqn, text in shardings.items() if text},
            ),
            key_paths=json.dumps(flat.paths | encode_nesting(flat.tree, flat.paths)),
        ),
        layouts=tuple(layouts),
        writes=plan.tensors,
        values=plan.values,
        names=frozenset((*flat.paths, *flat.per_rank)),
        per_rank=frozenset(flat.per_rank),
        tensor_bytes=tensor_bytes,
        clones=clones,
        left_open=tuple(fqn for fqn, text in shardings.items() if not text),
        places={fqn: index for index, fqn in enumerate(flat.tensors)},
        ordinary_tensors=frozenset(adapters.list_ordinary(flat.tensors)),
        copies=() if ranks.world_size == 1 else find_copies(layouts, ranks.rank, flat.tensors),
    )


def place_values(plan: SnapshotPlan, blobs: Mapping[str, bytes]) -> tuple[tuple[ValueOrder, ...], int]:
    """Place the values after the tensors. Return their orders, and how many bytes the region needs."""
    start = plan.tensor_bytes
    values = []
    for fqn, blob in blobs.items():
        values.append(ValueOrder(fqn=fqn, start=start, length_bytes=len(blob)))
        start = _align_up(start + len(blob))
    return tuple(values), start


def _place_tensors(plan: RankShare) -> tuple[tuple[TensorOrder, ...], int]:
    start = 0
    tensors = []
    for write in plan.tensors:
        fqn, dtype, global_shape, box, _, _ = write
        tensors.append(TensorOrder(fqn, dtype, global_shape, box.offsets, box.sizes, start))
        start = _align_up(start + write.size_bytes)
    return tuple(tensors), start


def _align_up(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _check_known_whole(layouts: Sequence[TensorLayout], ranks: Ranks) -> None:
    """Check that this rank knows the placement of all of each tensor: each rank decides alone which rank writes it."""
    incomplete = next((layout.fqn for layout in layouts if not layout.complete), None)
    if incomplete is not None and ranks.world_size > 1:
        raise UnsupportedShardingError(
            f"{incomplete}: this rank knows only its own part of the placement, but CheckpointManager needs all of it "
            "on every rank, as a DTensor has it. Use a DTensor, or save the tensor with torch.distributed.checkpoint "
            "and SPMDSavePlanner"
        )
