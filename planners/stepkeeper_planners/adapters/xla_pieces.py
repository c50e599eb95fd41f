"""Copy XLA tensors in pieces that come out of their program separately, each small enough to be moved by itself.

torch_xla moves a tensor whole, and holds the GIL meanwhile. A tensor that was copied whole could be cut only by another
program. A tile is the part of a tensor that one device holds.
"""

# ruff: noqa: SLF001 — torch_xla has no public API for what a checkpoint needs

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from stepkeeper_planners.adapters.op_sharding import Tiling, list_device_boxes
from stepkeeper_planners.adapters.xla import remove_padding, transfer_shards
from stepkeeper_planners.adapters.xla_sharding import (
    annotate_tiles,
    deduplicated_tiling,
    describe_as,
    local_devices,
    ordinal,
    tiling_of,
    unwrap,
)
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout

__all__ = [
    "ClonePlan",
    "DevicePiece",
    "HostPart",
    "clear_failure",
    "clone_in_pieces",
    "describe_clone",
    "is_multi_process_program",
    "move_to_host",
    "piece_without_copy",
    "plan_clone",
    "wait_until_computed",
    "with_fewer_pieces",
]

_C: Any = torch_xla._XLAC
_LONGEST_WAIT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClonePlan:
    """A plan to copy a tensor: no element twice if possible, and in pieces along one dimension."""

    tiling: Tiling | None
    """The copy's tiling; None if all devices hold the same."""

    dim: int
    bounds: tuple[int, ...]
    """Starts of the pieces along `dim`, counted in each device's tile, and the end of the last one."""

    device_bytes: int
    """The memory of the copy on this process's devices."""

    moved_bytes: int
    """Number of bytes of it that are moved to this host."""

    @property
    def n_pieces(self) -> int:
        """The number of pieces."""
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePiece:
    """A piece of a tensor on the devices, and which elements of the tensor are in it."""

    fqn: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    """The shape of the whole tensor."""

    size_bytes: int
    """Number of bytes of it that are moved to this host."""

    dim: int = 0
    start: int = 0
    """The first element along `dim`; if `dim` is tiled, the first of each tile."""

    tile: int | None = None
    """The number of elements of a tile along `dim`, if the piece has an additional dimension over the tiles."""


HostPart = tuple[Box, torch.Tensor]
"""Elements on the CPU, and their box in the whole tensor."""


def plan_clone(fqn: str, tensor: torch.Tensor, most_bytes: int) -> ClonePlan:
    """Plan to cut `tensor` into pieces, each of which moves about `most_bytes` at most to this host.

    Tilings that aren't even are left in one piece: the compiler would gather a result in such tiles.
    """
    bare = unwrap(tensor)
    shape = tuple(bare.shape)
    present = tiling_of(bare, fqn)
    tiling = deduplicated_tiling(bare, present) or present
    counts = (1,) * len(shape) if tiling is None else tiling.counts
    sizes = shape if tiling is None else tiling.padded_sizes(shape)
    n_devices = len(local_devices()) if xr.is_spmd() else 1
    tile_bytes = prod(sizes) * bare.itemsize
    # If all devices hold the same, one of them sends it.
    moved_bytes = tile_bytes * (1 if tiling is None else n_devices)
    even = all(size % count == 0 for size, count in zip(shape, counts, strict=True))
    dim, n_pieces = 0, -(-moved_bytes // most_bytes)
    if n_pieces > 1 and even:
        # The first dimension that is long enough, or else the longest.
        dim = next((d for d, size in enumerate(sizes) if size >= n_pieces), sizes.index(max(sizes)))
        n_pieces = min(n_pieces, sizes[dim])
    else:
        n_pieces = 1
    end = sizes[dim] if sizes else 1
    return ClonePlan(
        tiling=tiling,
        dim=dim,
        bounds=tuple(end * index // n_pieces for index in range(n_pieces + 1)),
        device_bytes=tile_bytes * n_devices,
        moved_bytes=moved_bytes,
    )


def with_fewer_pieces(cut: ClonePlan, most_bytes: int) -> ClonePlan:
    """Return the plan with fewer pieces. Each moves about `most_bytes` at most, or as much as one piece did before."""
    n_joined = max(most_bytes * cut.n_pieces // max(cut.moved_bytes, 1), 1)
    return replace(cut, bounds=(*cut.bounds[:-1:n_joined], cut.bounds[-1]))


def describe_clone(fqn: str, tensor: torch.Tensor, cut: ClonePlan, ranks: Ranks) -> TensorLayout:
    """Describe the layout of such a copy. Chunks stay those of the tensor if one process has all of its devices."""
    tiling = cut.tiling if is_multi_process_program() else tiling_of(unwrap(tensor), fqn)
    return describe_as(fqn, tensor, tiling, ranks)


def clone_in_pieces(fqn: str, tensor: torch.Tensor, cut: ClonePlan) -> Iterator[DevicePiece]:
    """Yield pending copies on the tensor's devices, which together are all of it."""
    bare = unwrap(tensor).detach()
    shape = tuple(bare.shape)
    tiling = cut.tiling
    if cut.n_pieces == 1:
        clone = bare.clone()
        if tiling is not None and tiling != tiling_of(bare, fqn):
            annotate_tiles(clone, tiling.groups, tiling.counts)
        yield DevicePiece(fqn=fqn, tensor=clone, shape=shape, size_bytes=cut.moved_bytes)
        return
    dim, tile = cut.dim, None
    counts = () if tiling is None else tiling.counts
    if counts and counts[dim] > 1:
        # The tiles get a dimension of their own, so that every device finds its part of the piece in its own tile.
        tile = shape[dim] // counts[dim]
        bare = bare.view(*shape[:dim], counts[dim], tile, *shape[dim + 1 :])
        counts = (*counts[: dim + 1], 1, *counts[dim + 1 :])
    axis = dim if tile is None else dim + 1
    for start, end in zip(cut.bounds, cut.bounds[1:], strict=False):
        clone = bare.narrow(axis, start, end - start).clone()
        if tiling is not None and tiling.copies == 1:
            annotate_tiles(clone, tiling.groups, counts)
        size_bytes = cut.moved_bytes * (end - start) // cut.bounds[-1]
        yield DevicePiece(
            fqn=fqn, tensor=clone, shape=shape, size_bytes=size_bytes, dim=dim, start=start, tile=tile
        )


def piece_without_copy(fqn: str, tensor: torch.Tensor, cut: ClonePlan) -> DevicePiece:
    """Return the tensor itself as the only piece. Its computation must have been started."""
    bare = unwrap(tensor)
    return DevicePiece(fqn=fqn, tensor=bare, shape=tuple(bare.shape), size_bytes=cut.moved_bytes)


def is_multi_process_program() -> bool:
    """Return whether the devices of several processes run one program, which all of them have to start."""
    return bool(xr.process_count() > 1 and xr.is_spmd())


def clear_failure() -> None:
    """Clear the failure of a program that has been reported, so that the next program doesn't report it again."""
    with suppress(RuntimeError):
        xm.wait_device_ops()


def wait_until_computed(pieces: Sequence[DevicePiece]) -> None:
    """Wait until the program that makes the last of the pieces has ended, without holding the GIL."""
    if not pieces:
        return
    there = threading.Event()
    try:
        _C._on_ready_callback(pieces[-1].tensor, there.set)
    except RuntimeError:
        # The device doesn't have it yet, or it failed there: moving it will raise.
        xm.wait_device_ops()
    else:
        there.wait(_LONGEST_WAIT_S)


def move_to_host(pieces: Sequence[DevicePiece]) -> Iterator[tuple[DevicePiece, list[HostPart]]]:
    """Yield each piece with its elements on the CPU. Elements on several devices come once.

    The GIL is held while shards move. Raises RuntimeError if the program that made the pieces failed.
    """
    tilings = [tiling_of(piece.tensor, piece.fqn) for piece in pieces]
    tiled = [index for index, tiling in enumerate(tilings) if tiling is not None]
    whole = [index for index, tiling in enumerate(tilings) if tiling is None]
    # If all devices hold the same, one copy is moved, without the GIL.
    moved = _C._xla_get_cpu_tensors([pieces[index].tensor for index in whole]) if whole else []
    for index, data in zip(whole, moved, strict=True):
        piece = pieces[index]
        box = Box.whole(tuple(piece.tensor.shape))
        yield piece, list(_parts(piece, [(box, remove_padding(data, box, piece.tensor.dtype))]))
    for index, shards in zip(tiled, transfer_shards([pieces[index].tensor for index in tiled]), strict=True):
        piece, tiling = pieces[index], tilings[index]
        assert tiling is not None
        boxes = list_device_boxes(tiling, tuple(piece.tensor.shape))
        found: dict[Box, torch.Tensor] = {}
        for data, device in shards:
            box = boxes[ordinal(device)]
            if box.volume and box not in found:
                found[box] = remove_padding(data, box, piece.tensor.dtype)
        yield piece, list(_parts(piece, found.items()))


def _parts(piece: DevicePiece, held: Iterable[HostPart]) -> Iterator[HostPart]:
    """Yield the elements of a piece with their boxes in the whole tensor. `held` has their boxes in the piece."""
    dim = piece.dim
    for box, data in held:
        if piece.tile is None:
            offsets = list(box.offsets)
            if piece.start:
                offsets[dim] += piece.start
            yield Box(offsets=tuple(offsets), sizes=box.sizes), data
            continue
        # The piece has a dimension over the tiles, and the elements of each tile are apart in the whole tensor.
        for index in range(box.sizes[dim]):
            first = (box.offsets[dim] + index) * piece.tile + piece.start + box.offsets[dim + 1]
            starts = (*box.offsets[:dim], first, *box.offsets[dim + 2 :])
            sizes = box.sizes[:dim] + box.sizes[dim + 1 :]
            yield Box(offsets=starts, sizes=sizes), data.select(dim, index)
