"""Taking a snapshot: all that the train loop waits for."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stepkeeper.checkpoint import TensorOrder, ValueOrder
from stepkeeper.snapshot.device import clone_on_device
from stepkeeper.snapshot.region import ALIGNMENT_BYTES, Region
from stepkeeper_planners import adapters
from stepkeeper_planners.assign import SavePlan, plan_save
from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.layout import Ranks
from stepkeeper_planners.state import gather_state
from stepkeeper_planners.values import encode_value

__all__ = ["Snapshot", "take_snapshot"]


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """This rank's share of the state after one step. Host tensors are in the region; device copies still have to go."""

    tensors: tuple[TensorOrder, ...]
    values: tuple[ValueOrder, ...]
    aliases: dict[str, str]
    key_paths: dict[str, tuple[str | int, ...]]
    local_indices: tuple[int, ...]
    """For each of `tensors`, which of this rank's local shards it is."""

    on_device: dict[str, torch.Tensor]
    """Copies of XLA tensors, by name: nothing that happens to the state changes them."""

    def transfer(self, region: Region) -> None:
        """All bytes are in the region, each device copy was dropped as soon as it was there.

        Called from a background thread. The transfer of one tensor holds the GIL.
        """
        by_fqn: dict[str, list[tuple[TensorOrder, int]]] = {}
        for order, local_index in zip(self.tensors, self.local_indices, strict=True):
            if order.fqn in self.on_device:
                by_fqn.setdefault(order.fqn, []).append((order, local_index))
        for fqn, mine in by_fqn.items():
            shards = adapters.local_shards(self.on_device.pop(fqn))
            for order, local_index in mine:
                _copy_in(region, order, shards[local_index])
        self.on_device.clear()


def take_snapshot(state: Mapping[str, object], ranks: Ranks, region: Region) -> Snapshot:
    """The state may change again: the snapshot does not follow it.

    XLA tensors are copied on their devices; only the dispatch of that is waited for. Called where nothing is pending
    (after the loop's own `torch_xla.sync()`) it compiles one small program, once; elsewhere the pending step is
    compiled anew with the copies in it. CPU tensors are copied into the region.

    Raises:
        UnsupportedValueError: a value is of a type that is not stored; it names the key.
        UnsupportedShardingError: a tensor is placed in a way that can't be described.

    """
    flat = gather_state(state)
    clones = clone_on_device(flat.tensors)
    now = flat.tensors | clones
    layouts = [adapters.describe(fqn, tensor, ranks) for fqn, tensor in now.items()]
    plan = plan_save(layouts, tuple(flat.values), ranks)
    blobs = {fqn: encode_value(fqn, flat.values[fqn]) for fqn in plan.values}
    orders, values, size_bytes = _laid_out(plan, blobs)
    region.reserve(size_bytes)
    for value in values:
        region.write(value.start, blobs[value.fqn])
    for order, write in zip(orders, plan.tensors, strict=True):
        if order.fqn not in clones:
            _copy_in(region, order, adapters.local_shard(now[order.fqn], write.local_index))
    return Snapshot(
        tensors=orders,
        values=values,
        aliases=dict(flat.aliases),
        key_paths=dict(flat.paths),
        local_indices=tuple(write.local_index for write in plan.tensors),
        on_device=clones,
    )


def _laid_out(
    plan: SavePlan, blobs: Mapping[str, bytes]
) -> tuple[tuple[TensorOrder, ...], tuple[ValueOrder, ...], int]:
    """Where each piece of the plan lies in the region, and the region's size."""
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
    values = []
    for fqn, blob in blobs.items():
        values.append(ValueOrder(fqn=fqn, start=start, length_bytes=len(blob)))
        start = _aligned(start + len(blob))
    return tuple(tensors), tuple(values), start


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _copy_in(region: Region, order: TensorOrder, shard: torch.Tensor) -> None:
    region.tensor(order.start, dtype_of(order.dtype), order.sizes).copy_(shard.detach())
