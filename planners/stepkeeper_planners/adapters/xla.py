"""Handle tensors of torch_xla. Their shards are described from the sharding's text alone.

torch_xla's own indices of a shard need the data to be there, and fail while a step is still running. torch_xla is
imported only here, in `xla_sharding` and in `xla_pieces`.
"""

# ruff: noqa: SLF001 — torch_xla has no public API for what a checkpoint needs

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.distributed.spmd import wrap_if_sharded

from stepkeeper_planners.adapters import plain
from stepkeeper_planners.adapters.op_sharding import Tiling, list_device_boxes, parse_sharding
from stepkeeper_planners.adapters.xla_sharding import (
    annotate_tiles,
    build_op_sharding,
    deduplicated_tiling,
    describe_as,
    local_devices,
    ordinal,
    sharding_text,
    tiling_of,
    unwrap,
)
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout

# Only torch_xla's extension module has shards and pending work.
_C: Any = torch_xla._XLAC


def describe(fqn: str, tensor: torch.Tensor, ranks: Ranks, sharding: str | None = None) -> TensorLayout:
    """Describe one chunk for each distinct tile, without padding, with all its copies.

    `sharding` is the text of the sharding that the tensor will get; None to describe it as it lies. Raises
    UnsupportedShardingError if it is MANUAL or unknown, or ranks and devices don't fit together.
    """
    return describe_as(fqn, tensor, _tiling(unwrap(tensor), sharding, fqn), ranks)


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the shards of this process's devices, in their order, on the CPU, contiguous, without padding.

    Raises UnsupportedShardingError if the sharding is MANUAL or unknown.
    """
    bare = unwrap(tensor)
    tiling = tiling_of(bare)
    if tiling is None:
        return [plain.to_plain_cpu(bare)]
    boxes = list_device_boxes(tiling, tuple(bare.shape))
    by_device = {device: data for data, device in transfer_shards([bare])[0]}
    return [remove_padding(by_device[name], boxes[ordinal(name)], bare.dtype) for name in local_devices()]


def fill(tensor: torch.Tensor, pieces: Mapping[int, torch.Tensor], sharding: str | None = None) -> None:
    """Fill all local shards from the pieces. A piece serves every local copy of its box.

    `sharding` is the text of the sharding that the tensor gets; None to leave it as it is. Its old data is
    neither moved nor read, and no program runs. Raises ValueError as `get_piece`, and
    UnsupportedShardingError.
    """
    bare = unwrap(tensor)
    tiling = _tiling(bare, sharding)
    if tiling is None:
        mark = build_op_sharding(None) if sharding is not None else _C._get_xla_op_sharding(bare)
        is_marked = mark and bare.numel()
        if is_marked:
            # A copy onto a marked tensor needs a program; marking data that was copied needs none.
            _C._xla_clear_sharding(bare)
        plain.fill(bare, pieces)
        if is_marked:
            _C._xla_mark_sharding(bare, mark)
        return
    if sharding is not None:
        # A tensor may have another sharding. Its data is replaced below, and nothing reads it before that.
        _C._xla_clear_sharding(bare)
        _C._xla_annotate_custom_sharding(bare, build_op_sharding(tiling))
    devices = local_devices()
    shape = tuple(bare.shape)
    boxes = list_device_boxes(tiling, shape)
    padded_sizes = tiling.padded_sizes(shape)
    by_box: dict[Box, torch.Tensor] = {}
    for index, name in enumerate(devices):
        box = boxes[ordinal(name)]
        # The piece has the local index of the first copy.
        if box not in by_box:
            by_box[box] = _add_padding(pieces, index, box, padded_sizes, bare.dtype)
    shards = [by_box[boxes[ordinal(name)]] for name in devices]
    _C._load_local_shards(bare.detach(), shards, devices)


def materialize(tensors: Iterable[torch.Tensor]) -> None:
    """Start all pending work if any of the XLA tensors has a computation pending."""
    bare = [unwrap(tensor) for tensor in tensors if tensor.device.type == "xla"]
    if bare and any(_C._check_tensor_need_materialization(bare)):
        # A sync advances XLA's random seed; training must draw the same numbers with and without saves and restores.
        seed = xm.get_rng_state()
        torch_xla.sync()
        xm.set_rng_state(seed)


def deduplicate_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Clone tensors of which several devices hold the same part, so that no two devices hold the same.

    torch_xla moves the shards of all devices or none. With these clones it moves each element once, and the
    shards of all processes have the same size. They cost one program, compiled at the first call, and the
    memory of one copy of the tensors, spread over the devices. The tensors, their shardings and the programs
    that use them stay as they were. All ranks call this with the same tensors, because it runs a program on
    all devices.
    """
    clones = {name: clone_deduplicated(tensor, name) for name, tensor in tensors.items()}
    made = {name: clone for name, clone in clones.items() if clone is not None}
    start_pending(made.values())
    return made


def clone_deduplicated(tensor: torch.Tensor, fqn: str) -> torch.Tensor | None:
    """Return a pending clone in which no two devices hold the same element; None if impossible or useless."""
    if tensor.device.type != "xla":
        return None
    bare = unwrap(tensor)
    tiling = deduplicated_tiling(bare, tiling_of(bare, fqn), across_processes_only=True)
    if tiling is None:
        return None
    clone = bare.detach().clone()
    annotate_tiles(clone, tiling.groups, tiling.counts)
    return clone


def start_pending(tensors: Iterable[torch.Tensor], *, until_running: bool = False) -> None:
    """Start the computations that are pending on these tensors.

    With `until_running`, wait until the devices have accepted them. Unlike torch_xla.sync(), this neither starts the
    training's pending work nor draws a new random seed.
    """
    bare = [unwrap(tensor) for tensor in tensors if tensor.device.type == "xla"]
    if bare:
        _C._xla_sync_multi(bare, [], until_running, True)


def structure(tensor: torch.Tensor) -> object:
    """Return the sharding's text."""
    return sharding_text(tensor)


def identity(tensor: torch.Tensor) -> object:
    """Return torch_xla's number of the tensor. Detached aliases share it; views have numbers of their own."""
    return ("xla", _C._xla_get_tensor_id(unwrap(tensor)))


def wrap_sharded(fqn: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Wrap the tensor as torch_xla's XLAShardedTensor if devices hold different parts; else return None."""
    if tiling_of(unwrap(tensor), fqn) is None:
        return None
    sharded: torch.Tensor = wrap_if_sharded(tensor)
    return sharded


def transfer_shards(tensors: list[torch.Tensor]) -> list[list[tuple[torch.Tensor, str]]]:
    """Return, for each of several unwrapped tensors, the data of its local shards, each with its device.

    Nothing else of the process runs meanwhile: torch_xla holds the GIL. Raises RuntimeError if their program
    failed.
    """
    if not tensors:
        return []
    shards: list[list[tuple[torch.Tensor, str]]]
    try:
        shards = _C._get_local_shards(tensors)
    except RuntimeError:
        # Between a sync and the start of its program a tensor has no buffers, and torch_xla doesn't wait for them.
        # Wait only in that case: it waits for the whole device, so a transfer during training would wait for each step.
        xm.wait_device_ops()
        shards = _C._get_local_shards(tensors)
    return shards


def remove_padding(data: torch.Tensor, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Return the box's elements, contiguous, without padding, in this dtype."""
    part = data if data.shape == box.sizes else data[tuple(slice(0, size) for size in box.sizes)]
    part = part.contiguous()
    # torch_xla returns unsigned integers of 16 bits and more as signed ones with the same bits.
    return part if part.dtype == dtype else part.view(dtype)


def _tiling(bare: torch.Tensor, sharding: str | None, fqn: str = "tensor") -> Tiling | None:
    """Return the tensor's tiling, or that of the sharding that it will get."""
    if sharding is None:
        return tiling_of(bare, fqn)
    return parse_sharding(fqn, sharding, bare.dim())


def _add_padding(
    pieces: Mapping[int, torch.Tensor], index: int, box: Box, sizes: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    if not box.volume:
        return torch.zeros(sizes, dtype=dtype)
    piece = plain.get_piece(pieces, index, box.sizes, dtype)
    if box.sizes == sizes:
        return piece.contiguous()
    padded = torch.zeros(sizes, dtype=dtype)
    padded[tuple(slice(0, size) for size in box.sizes)] = piece
    return padded
