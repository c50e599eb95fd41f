"""Handle the kinds of tensors alike: describe where their parts lie, read them and fill them."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, Protocol, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, distribute_tensor

from stepkeeper_planners.adapters import checkpointable, dtensor, plain
from stepkeeper_planners.adapters.forms import ORDINARY, OrdinaryForms, are_ordinary
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout

_form: Final = attrgetter("dtype", "layout", "shape")


class _Adapter(Protocol):
    def describe(self, fqn: str, tensor: torch.Tensor, ranks: Ranks) -> TensorLayout: ...
    def local_shards(self, tensor: torch.Tensor) -> list[torch.Tensor]: ...
    def fill(self, tensor: torch.Tensor, pieces: Mapping[int, torch.Tensor]) -> None: ...
    def identity(self, tensor: torch.Tensor) -> object: ...


def describe(fqn: str, tensor: torch.Tensor, ranks: Ranks, sharding: str | None = None) -> TensorLayout:
    """Describe where every part of the tensor lies, on all ranks. Nothing is computed or transferred.

    An XLA tensor with a pending computation may get its sharding only when that has run. So a save calls
    `materialize` first. `sharding` is the text of the sharding with which an XLA tensor will be filled; None
    to leave it. Raises UnsupportedShardingError if the placement doesn't determine which device holds what.
    """
    if sharding is not None:
        from stepkeeper_planners.adapters import xla

        return xla.describe(fqn, tensor, ranks, sharding)
    return _adapter(tensor, fqn).describe(fqn, tensor, ranks)


def describe_all(
    tensors: Mapping[str, torch.Tensor], ranks: Ranks, shardings: Mapping[str, str] | None = None
) -> list[TensorLayout]:
    """Describe these tensors, in order, as `describe` does. `shardings` are by name.

    Thousands of ordinary tensors have few different forms: each form is checked and described once.
    """
    alike: dict[object, TensorLayout] = {}
    layouts: list[TensorLayout] = []
    all_ordinary = are_ordinary(list(tensors.values()))
    for fqn, tensor in tensors.items():
        form = _form(tensor) if all_ordinary or is_ordinary(tensor) else None
        like = alike.get(form)
        if like is None:
            like = describe(fqn, tensor, ranks, (shardings or {}).get(fqn))
            if form is not None:
                alike[form] = like
            layouts.append(like)
        else:
            layouts.append(TensorLayout(fqn, like.dtype, like.global_shape, like.chunks))
    return layouts


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return all local shards by local index, as contiguous CPU tensors without padding.

    CPU tensors may share memory with the tensor. On XLA the transfer holds the GIL, and moves every copy of a
    partially replicated tensor.
    """
    return _adapter(tensor).local_shards(tensor)


def fill(tensor: torch.Tensor, pieces: Mapping[int, torch.Tensor], sharding: str | None = None) -> None:
    """Overwrite the tensor's elements in place, bit for bit. All copies on this rank are filled.

    Args:
        tensor: the tensor to fill.
        pieces: a CPU tensor for each of `TensorLayout.local_boxes(rank)`, by local index, with that box's sizes
            and the tensor's dtype.
        sharding: for an XLA tensor that has none, the text of the sharding that it gets, by which it was
            described; None to leave it as it is.

    Raises:
        ValueError: a piece is missing, or has another shape or dtype.
        UnsupportedShardingError: see `describe`.
    """
    if sharding is not None:
        from stepkeeper_planners.adapters import xla

        xla.fill(tensor, pieces, sharding)
        return
    _adapter(tensor).fill(tensor, pieces)


def distribute_as(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return `whole`, which all ranks have, placed as the tensor if that is a DTensor. No rank waits for another."""
    if not isinstance(tensor, DTensor) or not _is_dtensor(tensor):
        return whole
    whole = whole.to(device=tensor.device, dtype=tensor.dtype)
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def identity(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tied tensors: the same elements of the same memory. None if unknown."""
    if isinstance(tensor, ShardedTensor):
        # Not refused here: `describe` refuses it by its name.
        return None
    return _adapter(tensor).identity(tensor)


def structure(tensor: torch.Tensor) -> object:
    """Return a hashable key that is equal for tensors with equal descriptions; their elements don't matter. Cheap."""
    if is_ordinary(tensor):
        # A nested one has no shape.
        return (tensor.dtype, tensor.layout, None if tensor.is_nested else tensor.shape)
    kind: object = None
    if _is_dtensor(tensor):
        kind = dtensor.structure(tensor)
    elif checkpointable.is_checkpointable(tensor):
        kind = checkpointable.structure(tensor)
    elif tensor.device.type == "xla":
        from stepkeeper_planners.adapters import xla

        kind = xla.structure(tensor)
    return (type(tensor), tensor.dtype, tensor.device.type, tensor.layout, tuple(tensor.shape), kind)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether this is a CPU tensor of torch's own classes, without attributes. Fast: there may be thousands."""
    return type(tensor) in ORDINARY and tensor.is_cpu and not tensor.__dict__


def list_ordinary(tensors: Mapping[str, torch.Tensor]) -> Iterable[str]:
    """Return the names of the ordinary ones of these tensors."""
    if are_ordinary(list(tensors.values())):
        return tensors
    return [name for name, tensor in tensors.items() if is_ordinary(tensor)]


def ordinary_forms(tensors: Sequence[torch.Tensor]) -> OrdinaryForms | None:
    """Return the forms of these tensors; None unless all are ordinary and strided."""
    return OrdinaryForms(tensors) if are_ordinary(tensors) else None


def materialize(tensors: Iterable[torch.Tensor]) -> None:
    """Start all pending XLA work if any of these tensors has a computation pending; do nothing without XLA tensors."""
    if "torch_xla" in sys.modules:
        from stepkeeper_planners.adapters import xla

        xla.materialize(tensors)


def deduplicate_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return replacements for tensors of which a save would move more from the devices than it writes, by name.

    The replacements are copies on the devices, cut further, with equal elements. Empty without XLA tensors.
    All ranks call this with the same tensors, because it runs a program on all devices.
    """
    if "torch_xla" not in sys.modules:
        return {}
    from stepkeeper_planners.adapters import xla

    return xla.deduplicate_copies(tensors)


def is_one_program() -> bool:
    """Return whether the XLA devices of several processes run one program, which all of them have to start."""
    from stepkeeper_planners.adapters import xla_pieces

    return xla_pieces.is_multi_process_program()


def digest_on_devices(tensors: Sequence[torch.Tensor]) -> Callable[[], list[str]]:
    """Start digests of XLA tensors on their devices. Return a function that waits for them, in hex digits.

    Args:
        tensors: XLA tensors that are on devices of this process only.
    """
    if not tensors:
        return list
    from stepkeeper_planners.adapters import xla, xla_digests

    pending = xla_digests.start_digests(tensors)
    xla.start_pending([pending])
    return partial(xla_digests.read_digests, pending)


def clone_for_transfer(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a pending copy on the tensor's devices, cut as by `deduplicate_copies` if that helps."""
    if tensor.device.type == "xla":
        from stepkeeper_planners.adapters import xla

        clone = xla.clone_deduplicated(tensor, fqn)
        if clone is not None:
            return clone
    return tensor.detach().clone()


def copy_sharding(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give the tensor the sharding of `other`, which has the same shape; its elements stay."""
    if tensor.device.type == "xla" == other.device.type:
        from stepkeeper_planners.adapters import xla_sharding

        xla_sharding.copy_sharding(tensor, other)


def has_sharding(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has a sharding. An XLA tensor has none until it is marked or a program makes it."""
    if tensor.device.type != "xla":
        return True
    from stepkeeper_planners.adapters import xla_sharding

    return xla_sharding.has_sharding(tensor)


def clear_sharding(tensors: Sequence[torch.Tensor]) -> None:
    """Leave the sharding of these XLA tensors to the next program that writes them. Their data stays where it is."""
    if any(tensor.device.type == "xla" for tensor in tensors):
        from stepkeeper_planners.adapters import xla_sharding

        xla_sharding.clear_sharding(tensors)


def start_pending(tensors: Sequence[torch.Tensor]) -> None:
    """Start the computations that are pending on these tensors, and no others; do nothing without XLA tensors."""
    if "torch_xla" in sys.modules and any(tensor.device.type == "xla" for tensor in tensors):
        from stepkeeper_planners.adapters import xla

        xla.start_pending(tensors)


def host_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of the only local shard if it is on the CPU, else None. Writing to it fills the tensor."""
    adapter = _adapter(tensor)
    if adapter is dtensor:
        return dtensor.host_memory(tensor)
    return plain.host_memory(tensor) if adapter is plain else None


def local_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of the only local shard if it is where torch copies from by itself, else None."""
    adapter = _adapter(tensor)
    if adapter not in (plain, dtensor):
        return None
    local = dtensor.to_local(tensor) if adapter is dtensor else tensor
    if not (local.is_cpu or local.numel()):
        return None
    return local.detach() if local.requires_grad else local


def has_overlapping_elements(tensor: torch.Tensor) -> bool:
    """Return whether several elements certainly share one place in local memory, as after expand()."""
    if is_ordinary(tensor) and tensor.is_contiguous():
        return False
    if tensor.device.type == "xla":
        return False
    local = dtensor.to_local(tensor) if _is_dtensor(tensor) else tensor
    steps = zip(local.shape, local.stride(), strict=True)
    return local.numel() > 0 and any(size > 1 and not step for size, step in steps)


def select_sharded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of which devices hold different parts, wrapped as torch_xla's planners expect."""
    found = {}
    for fqn, tensor in tensors.items():
        if _is_dtensor(tensor):
            sharded = tensor if dtensor.is_sharded(tensor) else None
        elif checkpointable.is_checkpointable(tensor):
            sharded = tensor
        elif tensor.device.type == "xla":
            from stepkeeper_planners.adapters import xla

            sharded = xla.wrap_sharded(fqn, tensor)
        else:
            continue
        if sharded is not None:
            found[fqn] = sharded
    return found


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether this is a DTensor with a mesh of ranks. torch_xla's sharded tensor is one without a mesh."""
    return isinstance(tensor, DTensor) and tensor.device.type != "xla"


def _adapter(tensor: torch.Tensor, fqn: str = "tensor") -> _Adapter:
    if is_ordinary(tensor):
        return plain
    if isinstance(tensor, ShardedTensor):
        raise UnsupportedShardingError(
            f"{fqn}: torch's old ShardedTensor can't be stored. Use DTensor: fully_shard() makes one, and so does "
            "FullyShardedDataParallel with a device_mesh"
        )
    # DTensor comes first: its local tensor may be on any device, and its shape is global.
    if _is_dtensor(tensor):
        return dtensor
    if checkpointable.is_checkpointable(tensor):
        return checkpointable
    if tensor.device.type == "xla":
        # With such a tensor, torch_xla is imported already.
        from stepkeeper_planners.adapters import xla

        return cast("_Adapter", xla)
    return plain
