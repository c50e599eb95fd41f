"""What differs between kinds of tensors: where their parts lie, how those are read and filled."""

import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter, eq
from typing import Final, Protocol, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from stepkeeper_planners.adapters import checkpointable, dtensor, plain
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout

_ORDINARY: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_form: Final = attrgetter("dtype", "layout", "shape", "is_cpu", "__dict__")


class _Adapter(Protocol):
    def describe(self, fqn: str, tensor: torch.Tensor, ranks: Ranks) -> TensorLayout: ...
    def local_shards(self, tensor: torch.Tensor) -> list[torch.Tensor]: ...
    def fill(self, tensor: torch.Tensor, pieces: Mapping[int, torch.Tensor]) -> None: ...
    def identity(self, tensor: torch.Tensor) -> object: ...


def describe(fqn: str, tensor: torch.Tensor, ranks: Ranks) -> TensorLayout:
    """Where every part of the tensor lies, on all ranks. Only metadata is looked at: no computation, no transfer.

    An XLA tensor whose computation is still pending may get its sharding only when that has run: a save
    describes after `materialize`.

    Raises:
        UnsupportedShardingError: the placement doesn't say which device holds what.
    """
    return _adapter(tensor, fqn).describe(fqn, tensor, ranks)


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All local shards as contiguous CPU tensors without padding, by local index, moved once.

    CPU tensors may share memory with the tensor. On XLA the transfer holds the GIL, and moves every copy of a
    partially replicated tensor.

    Raises:
        UnsupportedShardingError: as `describe`.
    """
    return _adapter(tensor).local_shards(tensor)


def local_shard(tensor: torch.Tensor, local_index: int) -> torch.Tensor:
    """One local shard, as `local_shards`; on XLA each call moves all of the tensor's."""
    return local_shards(tensor)[local_index]


def fill(tensor: torch.Tensor, pieces: Mapping[int, torch.Tensor]) -> None:
    """The tensor has these elements, bit for bit, in place, with the sharding it had; other copies on this rank too.

    `pieces` holds a CPU tensor for each of `TensorLayout.local_boxes(rank)`, by its local index, of that box's sizes.

    Raises:
        ValueError: a piece is lacking, or has another shape or dtype.
        UnsupportedShardingError: as `describe`.
    """
    _adapter(tensor).fill(tensor, pieces)


def identity(tensor: torch.Tensor) -> object:
    """Equal for tied tensors: the same elements of the same memory. None where that can't be told."""
    if isinstance(tensor, ShardedTensor):
        # Refused when it is described, which can say its name.
        return None
    return _adapter(tensor).identity(tensor)


def structure(tensor: torch.Tensor) -> object:
    """Equal, and hashable, for tensors that are described alike, whatever their elements are. Cheap."""
    if is_ordinary(tensor):
        return (tensor.dtype, tensor.layout, tensor.shape)
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
    """On the CPU, of torch's own classes, without attributes of its own: told at once, for there may be thousands."""
    return type(tensor) in _ORDINARY and tensor.is_cpu and not tensor.__dict__


def ordinary_forms(tensors: Sequence[torch.Tensor]) -> list[object] | None:
    """For `have_forms`; None unless all are ordinary tensors with memory of their own."""
    if not all(is_ordinary(tensor) and tensor.layout is torch.strided for tensor in tensors):
        return None
    known: dict[object, object] = {}
    return [
        # Of thousands of tensors few have a form of their own.
        known.setdefault(structure(tensor), (tensor.dtype, tensor.layout, tensor.shape, True, {}))
        for tensor in tensors
    ]


def have_forms(tensors: Sequence[torch.Tensor], forms: Sequence[object]) -> bool:
    """Whether they are ordinary tensors too, each of the same structure. Much cheaper than to ask for these."""
    return _ORDINARY.issuperset(map(type, tensors)) and all(map(eq, map(_form, tensors), forms))


def materialize(tensors: Mapping[str, torch.Tensor]) -> None:
    """No tensor has a computation pending; without XLA tensors nothing is done."""
    if "torch_xla" in sys.modules:
        from stepkeeper_planners.adapters import xla

        xla.materialize(tensors.values())


def without_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What to save instead of those of `tensors` of which more would be moved than is written, by the same names.

    These are copies on the devices, cut further; all elements are equal. Empty without XLA tensors.

    Ranks: all call it with the same tensors, for it runs a program on all devices.
    """
    if "torch_xla" not in sys.modules:
        return {}
    from stepkeeper_planners.adapters import xla

    return xla.without_copies(tensors)


def clone_to_move(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """A pending copy on the tensor's devices, cut as by `without_copies` where that is a gain."""
    if tensor.device.type == "xla":
        from stepkeeper_planners.adapters import xla

        clone = xla.cut_clone(tensor, fqn)
        if clone is not None:
            return clone
    return tensor.detach().clone()


def zeros_placed_as(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the tensor's shape and dtype, on its devices, with its sharding."""
    zeros = torch.zeros_like(tensor.detach())
    place_as(zeros, tensor)
    return zeros


def place_as(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """The tensor has the sharding of the other one, which is of the same shape; its elements are as before."""
    if tensor.device.type == "xla" == other.device.type:
        from stepkeeper_planners.adapters import xla

        xla.place_as(tensor, other)


def has_sharding(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor has a sharding. An XLA tensor has none if nobody marked it and no program made it."""
    if tensor.device.type != "xla":
        return True
    from stepkeeper_planners.adapters import xla

    return xla.has_sharding(tensor)


def clear_sharding(tensors: Sequence[torch.Tensor]) -> None:
    """Leave the sharding of these XLA tensors to the next program that writes them. Their data stays where it is."""
    if any(tensor.device.type == "xla" for tensor in tensors):
        from stepkeeper_planners.adapters import xla

        xla.clear_sharding(tensors)


def start(tensors: Sequence[torch.Tensor]) -> None:
    """What was pending on these tensors was started, and nothing else; without XLA tensors nothing is done."""
    if any(tensor.device.type == "xla" for tensor in tensors):
        from stepkeeper_planners.adapters import xla

        xla.start(tensors)


def in_place(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of the only local shard, on the CPU: what is written there is in the tensor. Else None."""
    adapter = _adapter(tensor)
    if adapter is dtensor:
        return dtensor.in_place(tensor)
    return plain.in_place(tensor) if adapter is plain else None


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements of the local memory are surely one place in it, as after expand()."""
    if tensor.device.type == "xla":
        return False
    local = dtensor.local_part(tensor) if _is_dtensor(tensor) else tensor
    steps = zip(local.shape, local.stride(), strict=True)
    return local.numel() > 0 and any(size > 1 and not step for size, step in steps)


def sharded_among(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that lie in parts on several devices; of torch_xla, wrapped as its own planners have them.

    Raises:
        UnsupportedShardingError: as `describe`.
    """
    found = {}
    for fqn, tensor in tensors.items():
        if _is_dtensor(tensor):
            sharded = tensor if dtensor.is_sharded(tensor) else None
        elif checkpointable.is_checkpointable(tensor):
            sharded = tensor
        elif tensor.device.type == "xla":
            from stepkeeper_planners.adapters import xla

            sharded = xla.as_sharded(fqn, tensor)
        else:
            continue
        if sharded is not None:
            found[fqn] = sharded
    return found


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """Not torch_xla's sharded tensor: that is a DTensor by class, without a mesh of ranks."""
    return isinstance(tensor, DTensor) and tensor.device.type != "xla"


def _adapter(tensor: torch.Tensor, fqn: str = "tensor") -> _Adapter:
    if is_ordinary(tensor):
        return plain
    if isinstance(tensor, ShardedTensor):
        raise UnsupportedShardingError(
            f"{fqn}: torch's old ShardedTensor isn't stored. Use DTensor: fully_shard() makes it, and so does "
            "FullyShardedDataParallel where it is given a device_mesh"
        )
    # A DTensor first: its local tensor may be on any device, and what it says of its shape is global.
    if _is_dtensor(tensor):
        return dtensor
    if checkpointable.is_checkpointable(tensor):
        return checkpointable
    if tensor.device.type == "xla":
        # Such a tensor means that torch_xla was imported already.
        from stepkeeper_planners.adapters import xla

        return cast("_Adapter", xla)
    return plain
