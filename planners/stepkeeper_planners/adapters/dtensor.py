"""DTensor: described from its mesh and placements alone, so that every rank knows where all parts are."""

from collections.abc import Mapping

import torch
from torch.distributed import device_mesh
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from stepkeeper_planners.adapters import plain
from stepkeeper_planners.adapters.placements import (
    DimShard,
    Placements,
    RankMesh,
    add_slice_dimension,
    box_of_rank,
    check_ascending_ranks,
    chunks_in_group,
    chunks_on_mesh,
)
from stepkeeper_planners.dtypes import dtype_name
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.geometry.mesh_slices import list_mesh_slices


def describe(fqn: str, tensor: torch.Tensor, ranks: Ranks) -> TensorLayout:
    """One chunk for each place on the mesh, held by the ranks whose places differ in replicated dimensions only.

    On a slice of a larger mesh: the same tensor lies on the slices beside it, as it does on each of the ranks of a
    tensor-parallel group where a layer isn't parallel. Ranks outside of all that hold nothing.

    Ranks: those of the mesh are numbered as in the default process group.

    Raises:
        UnsupportedShardingError: a placement is Partial, or doesn't say who holds what; or ranks don't ascend along
            a mesh dimension that cuts; or a part lies outside of the process group; or the local tensor isn't what
            the placements say, or has no elements in memory.
    """
    shape = tuple(tensor.shape)
    local = to_local(tensor)
    plain.check_storable(fqn, local)
    try:
        mesh, placements = _placed(_dtensor(tensor))
        if ranks.members is None:
            chunks, own = chunks_on_mesh(mesh, placements, shape), ranks.rank
        else:
            chunks = chunks_in_group(mesh, placements, shape, ranks.members)
            own = ranks.members[ranks.rank]
        if tensor.numel():
            check_ascending_ranks(mesh, placements)
            held = box_of_rank(mesh, placements, shape, own)
            _check_local(local, own, None if held is None else held.sizes)
    except UnsupportedShardingError as error:
        raise UnsupportedShardingError(f"{fqn}: {error}") from error
    n_slices = mesh.shape[-1] if len(mesh.shape) > _dtensor(tensor).device_mesh.ndim else 1
    return TensorLayout(
        fqn=fqn,
        dtype=dtype_name(tensor.dtype),
        global_shape=shape,
        chunks=chunks,
        mesh_slices=list_mesh_slices(mesh.ranks, n_slices, ranks.members),
    )


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The local tensor on the CPU, contiguous; its own memory where it is that already."""
    if not tensor.numel():
        return [torch.empty(tensor.shape, dtype=tensor.dtype)]
    return [plain.to_plain_cpu(to_local(tensor))]


def host_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """The local tensor's own memory if it is on the CPU, else None."""
    return plain.host_memory(to_local(tensor))


def fill(tensor: torch.Tensor, pieces: Mapping[int, torch.Tensor]) -> None:
    """The local tensor has the piece's elements; nothing is done where it has no elements.

    Raises:
        ValueError: the piece is lacking, or has another shape or dtype.
    """
    local = to_local(tensor)
    if local.numel() and tensor.numel():
        plain.fill(local, pieces)


def identity(tensor: torch.Tensor) -> object:
    """Which memory, seen how, as which part of what.

    Told by the storage, not by its address: the local tensor may be empty on some ranks only, and tied on all.
    """
    local = to_local(tensor)
    part = (_dtensor(tensor).device_mesh, _dtensor(tensor).placements, tuple(tensor.shape))
    place = (local.storage_offset(), tuple(local.shape), local.stride(), local.dtype)
    return ("dtensor", local.untyped_storage()._cdata, place, part)  # noqa: SLF001 — as torch.serialization does


def structure(tensor: torch.Tensor) -> object:
    """Where its parts lie, and what the local one looks like."""
    local = to_local(tensor)
    held = (type(local), local.layout, local.is_quantized, tuple(local.shape))
    return (_dtensor(tensor).device_mesh, _dtensor(tensor).placements, held)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether different ranks hold different parts."""
    mesh = _dtensor(tensor).device_mesh
    return any(
        mesh.size(dim) > 1 and not placement.is_replicate()
        for dim, placement in enumerate(_dtensor(tensor).placements)
    )


def _dtensor(tensor: torch.Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor, with nothing pending."""
    with torch.no_grad():
        local = _dtensor(tensor).to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _placed(tensor: DTensor) -> tuple[RankMesh, Placements]:
    """Where all copies are, and how the tensor is cut over them."""
    mesh = tensor.device_mesh
    root = _root_of(mesh)
    placements = _placements(tensor.placements)
    slice_ = _rank_mesh(mesh)
    whole = slice_ if root is mesh else add_slice_dimension(slice_, _rank_mesh(root))
    return whole, placements + (None,) * (len(whole.shape) - len(slice_.shape))


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """What the mesh is a slice of; public in no version of torch."""
    find = getattr(mesh, "_get_root_mesh", None)
    root: DeviceMesh = find() if find else device_mesh._mesh_resources.get_root_mesh(mesh)  # noqa: SLF001 — see above
    return root


def _rank_mesh(mesh: DeviceMesh) -> RankMesh:
    return RankMesh(shape=tuple(mesh.mesh.shape), ranks=tuple(mesh.mesh.flatten().tolist()))


def _placements(placements: tuple[Placement, ...]) -> Placements:
    cuts: list[DimShard | None] = []
    for placement in placements:
        if placement.is_replicate():
            cuts.append(None)
        elif placement.is_partial():
            raise UnsupportedShardingError(
                f"it is placed as {placement}: each rank holds one term of a sum that no rank has. "
                "redistribute() it to Replicate or Shard first"
            )
        elif isinstance(dim := getattr(placement, "dim", None), int):
            # Some torch versions don't count a strided shard among the shards.
            cuts.append(DimShard(dim=dim, split_factor=getattr(placement, "split_factor", 1)))
        else:
            raise UnsupportedShardingError(
                f"it is placed as {placement}, which isn't known here; redistribute() it to Replicate or Shard first"
            )
    return tuple(cuts)


def _check_local(local: torch.Tensor, rank: int, sizes: tuple[int, ...] | None) -> None:
    if (local.numel() == 0) if sizes is None else (tuple(local.shape) == sizes):
        return
    placed = "an empty one" if sizes is None else sizes
    raise UnsupportedShardingError(
        f"rank {rank} has a part of shape {tuple(local.shape)}, where the placements say {placed}; make it with "
        "distribute_tensor(), or tell from_local() the shape"
    )
