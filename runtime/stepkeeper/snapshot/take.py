"""Taking a snapshot: all that the train loop waits for."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from stepkeeper.checkpoint import TensorOrder, ValueOrder
from stepkeeper.same_state import StateSummary
from stepkeeper.snapshot.device import clone_on_device
from stepkeeper.snapshot.region import ALIGNMENT_BYTES, Region
from stepkeeper_planners import adapters
from stepkeeper_planners.agree import digest_value, digest_whole_numbers
from stepkeeper_planners.assign import SavePlan, TensorWrite, plan_save
from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.layout import Ranks, TensorLayout
from stepkeeper_planners.nesting import notes
from stepkeeper_planners.per_rank import stored_name
from stepkeeper_planners.state import FlatState, gather_state
from stepkeeper_planners.values import content_bytes, encode_value

__all__ = ["Snapshot", "take_snapshot"]


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """This rank's share of the state after one step. Host tensors are in the region; device copies still have to go."""

    tensors: tuple[TensorOrder, ...]
    values: tuple[ValueOrder, ...]
    aliases: dict[str, str]
    key_paths: dict[str, tuple[str | int, ...]]
    """Name → the keys that lead to it; and what the names don't say of the nesting."""

    writes: tuple[TensorWrite, ...]
    """For each of `tensors`, which part of which of this rank's local shards it is."""

    summary: StateSummary
    """What of the state all ranks must have alike."""

    on_device: dict[str, torch.Tensor]
    """Copies of XLA tensors, by name: nothing that happens to the state changes them."""

    def transfer(self, region: Region) -> None:
        """All bytes are in the region, each device copy was dropped as soon as it was there.

        Called from a background thread. The transfer of one tensor holds the GIL.
        """
        for fqn, mine in _by_tensor(self.tensors, self.writes):
            if fqn in self.on_device:
                _copy_in(region, self.on_device.pop(fqn), mine)
        self.on_device.clear()


def take_snapshot(state: Mapping[str, object], ranks: Ranks, region: Region) -> Snapshot:
    """The state may change again: the snapshot does not follow it.

    XLA tensors are copied on their devices; only the dispatch of that is waited for. Called where nothing is pending
    (after the loop's own `torch_xla.sync()`) it compiles one small program, once; elsewhere the pending step is
    compiled anew with the copies in it. CPU tensors are copied into the region.

    Raises:
        UnsupportedValueError: a value is of a type that is not stored; it names the key.
        UnsupportedShardingError: a tensor is placed in a way that can't be described, or that no rank knows alone.

    """
    flat = gather_state(state)
    clones = clone_on_device(flat.tensors)
    now = flat.tensors | clones
    layouts = [adapters.describe(fqn, tensor, ranks) for fqn, tensor in now.items()]
    _check_known_whole(layouts, ranks)
    plan = plan_save(layouts, {fqn: content_bytes(value) for fqn, value in flat.values.items()}, ranks)
    blobs = {fqn: encode_value(fqn, flat.values[fqn]) for fqn in plan.values}
    for fqn, value in flat.per_rank.items():
        blobs[stored_name(fqn, ranks)] = encode_value(fqn, value)
    orders, values, size_bytes = _laid_out(plan, blobs)
    region.reserve(size_bytes)
    for order in values:
        region.write(order.start, blobs[order.fqn])
    for fqn, mine in _by_tensor(orders, plan.tensors):
        if fqn not in clones:
            _copy_in(region, now[fqn], mine)
    return Snapshot(
        tensors=orders,
        values=values,
        aliases=dict(flat.aliases),
        key_paths=flat.paths | notes(flat.tree),
        writes=plan.tensors,
        summary=_summary(flat, layouts, ranks),
        on_device=clones,
    )


def _check_known_whole(layouts: Sequence[TensorLayout], ranks: Ranks) -> None:
    """Who writes what is decided by every rank alone, so each must know where all of a tensor lies."""
    partial = next((layout.fqn for layout in layouts if not layout.complete), None)
    if partial is not None and ranks.world_size > 1:
        raise UnsupportedShardingError(
            f"{partial}: this rank knows only its own part of it, and CheckpointManager saves tensors whose placement "
            "every rank knows whole, such as a DTensor. Make it one, or save it with torch.distributed.checkpoint and "
            "SPMDSavePlanner"
        )


def _summary(flat: FlatState, layouts: Sequence[TensorLayout], ranks: Ranks) -> StateSummary:
    if ranks.world_size == 1:
        return StateSummary()
    numbers = {fqn: digest_whole_numbers(tensor) for fqn, tensor in flat.tensors.items()}
    return StateSummary(
        layouts=layouts,
        values={fqn: digest_value(fqn, value) for fqn, value in flat.values.items()},
        contents={fqn: digest for fqn, digest in numbers.items() if digest is not None},
        aliases=dict(flat.aliases),
        per_rank=tuple(flat.per_rank),
    )


_Mine = list[tuple[TensorOrder, TensorWrite]]


def _by_tensor(orders: Iterable[TensorOrder], writes: Iterable[TensorWrite]) -> Iterator[tuple[str, _Mine]]:
    """What this rank writes of each tensor, in the order of the plan, which has the parts of a tensor together."""
    pairs = zip(orders, writes, strict=True)
    for fqn, mine in groupby(pairs, key=lambda pair: pair[0].fqn):
        yield fqn, list(mine)


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


def _copy_in(region: Region, tensor: torch.Tensor, mine: _Mine) -> None:
    """The tensor's shards were moved once, and the parts that this rank writes are in the region."""
    shards = adapters.local_shards(tensor)
    for order, write in mine:
        part = shards[write.local_index].detach()[write.shard_box.slices]
        region.tensor(order.start, dtype_of(order.dtype), order.sizes).copy_(part)
