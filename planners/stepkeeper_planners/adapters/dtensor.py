"""Handle DTensors. They are described from mesh and placements alone, so every rank knows where all parts are."""

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
    """Describe one chunk for each place on the mesh. The ranks that differ only in replicated dimensions hold copies.

    A tensor on a slice of a larger mesh also lies on the slices beside it. An example is a layer that isn't
    parallel, in a tensor-parallel group: each rank of the group holds it. Ranks outside of all slices hold
    nothing. The mesh uses global ranks.

    Raises UnsupportedShardingError if a placement is Partial, or doesn't determine which rank holds what;
    ranks don't ascend along a mesh dimension that shards; a part lies outside of the process group; or the
    local tensor doesn't match the placements, or has no elements in memory.
    """
    shape = tuple(tensor.shape)
    local = to_local(tensor)
    plain.check_storable(fqn, local)
    try:
        mesh, placements = _find_placement(_dtensor(tensor))
        if ranks.members is None:
            chunks, global_rank = chunks_on_mesh(mesh, placements, shape), ranks.rank
        else:
            chunks = chunks_in_group(mesh, placements, shape, ranks.members)
            global_rank = ranks.members[ranks.rank]
        if tensor.numel():
            check_ascending_ranks(mesh, placements)
            held = box_of_rank(mesh, placements, shape, global_rank)
            _check_local(local, global_rank, None if held is None else held.sizes)
    except UnsupportedShardingError as error:
        raise UnsupportedShardingError(f"{fqn}: {error}") from error
    # If there are several slices, `_find_placement` has added a dimension for them.
    n_slices = mesh.shape[-1] if len(mesh.shape) > _dtensor(tensor).device_mesh.ndim else 1
    return TensorLayout(
        fqn=fqn,
        dtype=dtype_name(tensor.dtype),
        global_shape=shape,
        chunks=chunks,
        mesh_slices=list_mesh_slices(mesh.ranks, n_slices, ranks.members),
    )


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the local tensor on the CPU, contiguous; its own memory if it is that already."""
    if not tensor.numel():
        return [torch.empty(tensor.shape, dtype=tensor.dtype)]
    return [plain.to_plain_cpu(to_local(tensor))]


def host_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the local tensor's own memory if it is on the CPU, else None."""
    return plain.host_memory(to_local(tensor))


def fill(tensor: torch.Tensor, pieces: Mapping[int, torch.Tensor]) -> None:
    """Fill the local tensor from its piece; do nothing if it has no elements. Raises ValueError."""
    local = to_local(tensor)
    if local.numel() and tensor.numel():
        plain.fill(local, pieces)


def identity(tensor: torch.Tensor) -> object:
    """Return which memory it uses, how it views it, and which part of the global tensor that is.

    The storage object identifies the memory, not its address: the local tensor may be empty on some ranks
    only, and tied on all.
    """
    own, local = _dtensor(tensor), to_local(tensor)
    part = (own.device_mesh, own.placements, own.shape)
    place = (local.storage_offset(), local.shape, local.stride(), local.dtype)
    return ("dtensor", local.untyped_storage()._cdata, place, part)  # noqa: SLF001 — as torch.serialization does


def structure(tensor: torch.Tensor) -> object:
    """Return where its parts lie, and the form of the local one."""
    own, local = _dtensor(tensor), to_local(tensor)
    return (own.device_mesh, own.placements, type(local), local.layout, local.is_quantized, local.shape)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether different ranks hold different parts."""
    mesh = _dtensor(tensor).device_mesh
    return any(
        mesh.size(dim) > 1 and not placement.is_replicate()
        for dim, placement in enumerate(_dtensor(tensor).placements)
    )


def _dtensor(tensor: torch.Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor, with nothing pending."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            local = _dtensor(tensor).to_local()
    else:  # entering the block takes ten times as long
        local = _dtensor(tensor).to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _find_placement(tensor: DTensor) -> tuple[RankMesh, Placements]:
    """Return the mesh of all ranks with copies, and how the tensor is sharded over it."""
    placements, mesh = _placements(tensor.placements), _rank_mesh(tensor.device_mesh)
    root = _root_of(tensor.device_mesh)
    if root is not tensor.device_mesh:
        mesh = add_slice_dimension(mesh, _rank_mesh(root))
    # The slices hold copies.
    return mesh, placements + (None,) * (len(mesh.shape) - len(placements))


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one is a slice of. No version of torch has a public function for it."""
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
                f"it is placed as {placement}, which isn't supported; redistribute() it to Replicate or Shard first"
            )
    return tuple(cuts)


def _check_local(local: torch.Tensor, rank: int, sizes: tuple[int, ...] | None) -> None:
    """Check the local tensor's shape against the `sizes` that the placements imply; None if it should be empty."""
    fits = local.numel() == 0 if sizes is None else tuple(local.shape) == sizes
    if fits:
        return
    placed = "an empty one" if sizes is None else sizes
    raise UnsupportedShardingError(
        f"rank {rank} holds a part of shape {tuple(local.shape)}, but the placements imply {placed}; make it with "
        "distribute_tensor(), or pass the shape to from_local()"
    )
