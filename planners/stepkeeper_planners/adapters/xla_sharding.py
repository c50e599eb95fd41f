"""Read and set the shardings of torch_xla's tensors, by the sharding's text alone."""

# ruff: noqa: SLF001 — torch_xla has no public API for what a checkpoint needs

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import ShardingType, XLAShardedTensor

from stepkeeper_planners.adapters.op_sharding import Tiling, device_owners, parse_sharding
from stepkeeper_planners.dtypes import dtype_name
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout, whole_tensor

__all__ = [
    "SMALLEST_PART_BYTES",
    "annotate_tiles",
    "build_op_sharding",
    "clear_sharding",
    "copy_sharding",
    "count_devices",
    "deduplicated_tiling",
    "describe_as",
    "has_sharding",
    "local_devices",
    "ordinal",
    "sharding_text",
    "tiling_of",
    "unwrap",
]

# Only torch_xla's extension module has shardings.
_C: Any = torch_xla._XLAC

SMALLEST_PART_BYTES: Final = 64 * 1024
"""Copies below this size per device are moved as they are: cutting them costs more than their transfer."""


def describe_as(fqn: str, tensor: torch.Tensor, tiling: Tiling | None, ranks: Ranks) -> TensorLayout:
    """Describe a copy of the tensor that lies in these tiles. Raises UnsupportedShardingError."""
    shape = tuple(tensor.shape)
    if tiling is None:
        return whole_tensor(fqn, dtype_name(tensor.dtype), shape, ranks)
    owners = _owners(ranks)
    chunks = tuple(
        Chunk(box=box, owners=tuple(sorted(owner for device in group for owner in owners[device])))
        for group, box in zip(tiling.groups, tiling.boxes(shape), strict=True)
        if box.volume
    )
    return TensorLayout(fqn=fqn, dtype=dtype_name(tensor.dtype), global_shape=shape, chunks=chunks)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside an XLAShardedTensor, or the tensor itself."""
    bare: torch.Tensor = tensor.global_tensor if isinstance(tensor, XLAShardedTensor) else tensor
    return bare


def tiling_of(bare: torch.Tensor, fqn: str = "tensor") -> Tiling | None:
    """Return how the tensor is tiled; None if every device holds all of it, or it has no elements.

    Raises UnsupportedShardingError if the sharding is MANUAL or unknown.
    """
    tiling = parse_sharding(fqn, sharding_text(bare), bare.dim())
    # An empty tensor has no parts: it is one chunk that every rank holds.
    return tiling if bare.numel() else None


def deduplicated_tiling(
    bare: torch.Tensor, present: Tiling | None, *, across_processes_only: bool = False
) -> Tiling | None:
    """Return the tiling of a copy in which no two devices hold the same element; None if impossible or useless.

    With `across_processes_only`, copies on the devices of a single process are kept.
    """
    shape = tuple(bare.shape)
    if present is None and bare.numel() and xr.is_spmd():
        devices = tuple(ordinal(name) for name in _C._xla_get_all_runtime_devices())
        if len(devices) > 1 and not (across_processes_only and xr.process_count() == 1):
            present = Tiling(counts=(1,) * len(shape), groups=(devices,))
    if present is None or present.copies == 1:
        return None
    tiling = present.deduplicated(shape)
    if tiling is None or bare.numel() * bare.itemsize < SMALLEST_PART_BYTES * len(tiling.groups):
        return None
    return tiling


def annotate_tiles(
    pending: torch.Tensor, groups: tuple[tuple[int, ...], ...], counts: tuple[int, ...]
) -> None:
    """Make the pending tensor come out of its program in tiles, each on one device."""
    _C._xla_annotate_custom_sharding(pending, build_op_sharding(Tiling(counts=counts, groups=groups)))


def build_op_sharding(tiling: Tiling | None) -> Any:
    """Build torch_xla's object for a tiling, as `mark_sharding` builds it; None for one copy on every device.

    Programs are known by a hash that has the object's bytes in it: an object that is built from the text of a
    sharding that XLA itself chose gives the same programs.
    """
    if tiling is None:
        return _C.OpSharding([], [], [], int(ShardingType.REPLICATED))
    devices = np.array(tiling.groups)
    if tiling.copies == 1:
        return _C.OpSharding(devices.reshape(tiling.counts).tolist(), [], [], int(ShardingType.TILED))
    groups = np.arange(len(devices)).reshape(tiling.counts)
    assignment = devices.reshape(*tiling.counts, tiling.copies)
    return _C.OpSharding(assignment.tolist(), groups.tolist(), devices.tolist(), int(ShardingType.PARTIAL))


def copy_sharding(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give the tensor the sharding of `other`, if that has one, from the next program on."""
    bare, source = unwrap(tensor), unwrap(other)
    wanted = sharding_text(source)
    if wanted and sharding_text(bare) != wanted:
        _C._xla_annotate_custom_sharding(bare, _C._get_xla_op_sharding(source))


def ordinal(name: str) -> int:
    """Return the number in "TPU:5", by which shardings name the device."""
    return int(name.rsplit(":", 1)[1])


def local_devices() -> list[str]:
    """Return the names of this process's devices."""
    names: list[str] = _C._xla_get_runtime_devices()
    return names


@lru_cache(maxsize=8)
def _owners(ranks: Ranks) -> dict[int, tuple[Owner, ...]]:
    local = [ordinal(name) for name in local_devices()]
    everywhere = [ordinal(name) for name in _C._xla_get_all_runtime_devices()]
    return device_owners(local, everywhere, xr.process_count(), ranks)


def sharding_text(tensor: torch.Tensor) -> str:
    """Return the sharding's text, "" for a tensor that has none."""
    bare = unwrap(tensor)
    # A read returns the cached sharding, and only then updates it from the pending computation.
    _C._get_xla_sharding_spec(bare)
    return str(_C._get_xla_sharding_spec(bare))


def count_devices() -> int:
    """Return the number of devices that tensors are sharded over, in all processes; 0 without SPMD."""
    return len(_C._xla_get_all_runtime_devices()) if xr.is_spmd() else 0


def has_sharding(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has a sharding, `{replicated}` included: a program that writes it must keep that."""
    return bool(sharding_text(tensor))


def clear_sharding(tensors: Iterable[torch.Tensor]) -> None:
    """Remove the shardings, so that the compiler chooses them in the next program that writes the tensors."""
    for tensor in tensors:
        if tensor.device.type == "xla":
            _C._xla_clear_sharding(unwrap(tensor))
