"""Tensors of torch_xla. Shards are described from the sharding's text alone.

torch_xla's own indices of a shard need the data to be there, and fail while a step is still running. It is imported
here and in `xla_pieces` only.
"""

# ruff: noqa: SLF001 — what a checkpoint needs to know is public in no version of torch_xla

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import ShardingType, XLAShardedTensor, wrap_if_sharded

from stepkeeper_planners.adapters import plain
from stepkeeper_planners.adapters.devices import device_owners
from stepkeeper_planners.adapters.op_sharding import Tiling, parse_sharding
from stepkeeper_planners.dtypes import dtype_name
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout, whole_tensor

# torch_xla has shards, sharding specs and pending work nowhere but in its extension module.
_C: Any = torch_xla._XLAC

SMALLEST_PART_BYTES: Final = 64 * 1024
"""Copies of less than this per device are moved along: chunks that small cost more than their transfer."""


def describe(fqn: str, tensor: torch.Tensor, ranks: Ranks) -> TensorLayout:
    """One chunk for each distinct tile, without padding, with all its copies.

    Raises:
        UnsupportedShardingError: MANUAL or unknown sharding, or ranks and devices don't fit together.
    """
    return describe_as(fqn, tensor, tiling_of(bare_of(tensor), fqn), ranks)


def describe_as(fqn: str, tensor: torch.Tensor, tiling: Tiling | None, ranks: Ranks) -> TensorLayout:
    """`describe`, for a copy of the tensor that lies in these tiles.

    Raises:
        UnsupportedShardingError: ranks and devices don't fit together.
    """
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


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The shards of this process's devices, in their order, on the CPU, contiguous, unpadded.

    Raises:
        UnsupportedShardingError: MANUAL or unknown sharding.
    """
    bare = bare_of(tensor)
    tiling = tiling_of(bare)
    if tiling is None:
        return [plain.plain_data(bare)]
    boxes = tiling.device_boxes(tuple(bare.shape))
    by_device = {device: data for data, device in _transferred(bare)}
    return [unpadded(by_device[name], boxes[ordinal(name)], bare.dtype) for name in local_devices()]


def fill(tensor: torch.Tensor, pieces: Mapping[int, torch.Tensor]) -> None:
    """All local shards have the pieces' elements; a piece serves every local copy of its box.

    Raises:
        ValueError: a piece is lacking, or has another shape or dtype.
        UnsupportedShardingError: MANUAL or unknown sharding.
    """
    bare = bare_of(tensor)
    tiling = tiling_of(bare)
    if tiling is None:
        plain.fill(bare, pieces)
        return
    devices = local_devices()
    shape = tuple(bare.shape)
    boxes = tiling.device_boxes(shape)
    padded_sizes = tiling.padded_sizes(shape)
    first: dict[Box, int] = {}
    shards: list[torch.Tensor] = []
    for index, name in enumerate(devices):
        box = boxes[ordinal(name)]
        if box in first:
            shards.append(shards[first[box]])
            continue
        first[box] = index
        shards.append(_padded(pieces, index, box, padded_sizes, bare.dtype))
    _C._load_local_shards(bare.detach(), shards, devices)


def materialize(tensors: Iterable[torch.Tensor]) -> None:
    """None of the XLA tensors has a computation pending: if one had, all pending work was started."""
    bare = [bare_of(tensor) for tensor in tensors if tensor.device.type == "xla"]
    if bare and any(_C._check_tensor_need_materialization(bare)):
        # A sync moves XLA's random seed on. Training draws the same numbers whether it is saved and restored or not.
        seed = xm.get_rng_state()
        torch_xla.sync()
        xm.set_rng_state(seed)


def without_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the devices, for tensors that several devices hold the same part of: there no two hold the same.

    torch_xla moves the shards of all devices or none. Of these copies that is each element once, and the shards of
    all processes are of one size. They cost one program, compiled at the first call, and the memory of one copy of the
    tensors, spread over the devices. The tensors, their shardings and the programs that use them stay as they were.

    Ranks: all call it with the same tensors, for it runs a program on all devices.
    """
    parted = {
        name: parts for name, tensor in tensors.items() if (parts := cut_clone(tensor, name)) is not None
    }
    start(parted.values())
    return parted


def cut_clone(tensor: torch.Tensor, fqn: str = "tensor") -> torch.Tensor | None:
    """A pending clone in which no two devices hold the same element; None where that is not possible, or no gain."""
    if tensor.device.type != "xla":
        return None
    bare = bare_of(tensor)
    tiling = cut_tiling(bare, tiling_of(bare, fqn), across_processes_only=True)
    if tiling is None:
        return None
    clone = bare.detach().clone()
    place_in_tiles(clone, tiling.groups, tiling.counts)
    return clone


def cut_tiling(
    bare: torch.Tensor, present: Tiling | None, *, across_processes_only: bool = False
) -> Tiling | None:
    """The tiling of a copy in which no two devices hold the same element; None where it can't be had, or is no gain.

    With `across_processes_only`, what all devices of a single process hold alike is left as it is.
    """
    shape = tuple(bare.shape)
    if present is None and bare.numel() and xr.is_spmd():
        devices = tuple(ordinal(name) for name in _C._xla_get_all_runtime_devices())
        if len(devices) > 1 and not (across_processes_only and xr.process_count() == 1):
            present = Tiling(counts=(1,) * len(shape), groups=(devices,))
    if present is None or present.copies == 1:
        return None
    tiling = present.without_copies(shape)
    if tiling is None or bare.numel() * bare.itemsize < SMALLEST_PART_BYTES * len(tiling.groups):
        return None
    return tiling


def place_in_tiles(
    pending: torch.Tensor, groups: tuple[tuple[int, ...], ...], counts: tuple[int, ...]
) -> None:
    """The pending tensor comes out of its program in tiles, each on one device."""
    assignment = np.array(groups).reshape(counts).tolist()
    _C._xla_annotate_custom_sharding(pending, _C.OpSharding(assignment, [], [], int(ShardingType.TILED)))


def place_as(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """The tensor has the sharding of the other one, if that has one, from the next program on."""
    bare, wanted = bare_of(tensor), _C._get_xla_op_sharding(bare_of(other))
    if wanted and _C._get_xla_sharding_spec(bare) != _C._get_xla_sharding_spec(bare_of(other)):
        _C._xla_annotate_custom_sharding(bare, wanted)


def has_sharding(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor has a sharding, `{replicated}` included: a program that writes it must keep that."""
    return bool(_C._get_xla_sharding_spec(bare_of(tensor)))


def clear_sharding(tensors: Iterable[torch.Tensor]) -> None:
    """Remove the shardings, so that the compiler chooses them in the next program that writes the tensors."""
    for tensor in tensors:
        if tensor.device.type == "xla":
            _C._xla_clear_sharding(bare_of(tensor))


def start(tensors: Iterable[torch.Tensor], *, until_running: bool = False) -> None:
    """What was pending on these tensors was started; with `until_running`, the devices have taken it on.

    Other than torch_xla.sync() this neither starts the training's pending work nor draws a new random seed.
    """
    bare = [bare_of(tensor) for tensor in tensors if tensor.device.type == "xla"]
    if bare:
        _C._xla_sync_multi(bare, [], until_running, True)


def structure(tensor: torch.Tensor) -> object:
    """The sharding's text."""
    text: str = _C._get_xla_sharding_spec(bare_of(tensor))
    return text


def identity(tensor: torch.Tensor) -> object:
    """torch_xla's number of the tensor, which detached aliases share; views have numbers of their own."""
    return ("xla", _C._xla_get_tensor_id(bare_of(tensor)))


def as_sharded(fqn: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor wrapped as torch_xla's, if different devices hold different parts."""
    if tiling_of(bare_of(tensor), fqn) is None:
        return None
    sharded: torch.Tensor = wrap_if_sharded(tensor)
    return sharded


def bare_of(tensor: torch.Tensor) -> torch.Tensor:
    bare: torch.Tensor = tensor.global_tensor if isinstance(tensor, XLAShardedTensor) else tensor
    return bare


def tiling_of(bare: torch.Tensor, fqn: str = "tensor") -> Tiling | None:
    tiling = parse_sharding(fqn, _C._get_xla_sharding_spec(bare), bare.dim())
    # There is nothing to tell apart in an empty tensor: one chunk for each rank.
    return tiling if bare.numel() else None


def ordinal(name: str) -> int:
    """The number in "TPU:5", by which shardings name the device."""
    return int(name.rsplit(":", 1)[1])


def local_devices() -> list[str]:
    names: list[str] = _C._xla_get_runtime_devices()
    return names


@lru_cache(maxsize=8)
def _owners(ranks: Ranks) -> dict[int, tuple[Owner, ...]]:
    local = [ordinal(name) for name in local_devices()]
    everywhere = [ordinal(name) for name in _C._xla_get_all_runtime_devices()]
    return device_owners(local, everywhere, xr.process_count(), ranks)


def _transferred(bare: torch.Tensor) -> list[tuple[torch.Tensor, str]]:
    """The data of the local shards and their devices."""
    shards: list[tuple[torch.Tensor, str]]
    try:
        shards = _C._get_local_shards([bare])[0]
    except RuntimeError:
        # Between a sync and the start of its program the tensor has no buffers, and torch_xla doesn't wait for them.
        # Waiting only then: it is for the whole device, so a transfer behind the training would wait for each step.
        xm.wait_device_ops()
        shards = _C._get_local_shards([bare])[0]
    return shards


def unpadded(data: torch.Tensor, box: Box, dtype: torch.dtype) -> torch.Tensor:
    part = data if data.shape == box.sizes else data[tuple(slice(0, size) for size in box.sizes)]
    part = part.contiguous()
    # Unsigned integers of 16 bits and more come back as signed ones of the same bits.
    return part if part.dtype == dtype else part.view(dtype)


def _padded(
    pieces: Mapping[int, torch.Tensor], index: int, box: Box, sizes: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    if not box.volume:
        return torch.zeros(sizes, dtype=dtype)
    piece = plain.checked_piece(pieces, index, box.sizes, dtype)
    if box.sizes == sizes:
        return piece.contiguous()
    padded = torch.zeros(sizes, dtype=dtype)
    padded[tuple(slice(0, size) for size in box.sizes)] = piece
    return padded
