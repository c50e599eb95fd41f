"""Handle tensors that every rank holds whole."""

from collections.abc import Mapping

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stepkeeper_planners.dtypes import dtype_name
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout, whole_tensor


def describe(fqn: str, tensor: torch.Tensor, ranks: Ranks) -> TensorLayout:
    """Describe one chunk that all ranks hold. Raises as `check_storable`."""
    check_storable(fqn, tensor)
    return whole_tensor(fqn, dtype_name(tensor.dtype), tensor.shape, ranks)


def check_storable(fqn: str, tensor: torch.Tensor) -> None:
    """Check that the tensor has its elements in memory, strided, and isn't made of other tensors.

    Raises UnsupportedShardingError, which suggests what to do.
    """
    if tensor.is_meta:
        raise UnsupportedShardingError(
            f"{fqn}: a tensor on the meta device has no data; materialize it first"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UnsupportedShardingError(f"{fqn}: a {kind} tensor can't be stored; make it a dense one")
    if dtype_name(tensor.dtype).startswith("bits"):
        raise UnsupportedShardingError(
            f"{fqn}: a tensor of {tensor.dtype} can't be stored; save its view(torch.uint8)"
        )
    if is_traceable_wrapper_subclass(tensor):
        parts = ", ".join(tensor.__tensor_flatten__()[0])
        raise UnsupportedShardingError(
            f"{fqn}: a {type(tensor).__name__} is made of other tensors ({parts}); store those, or turn it into "
            "a plain tensor"
        )


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor on the CPU, contiguous; its own memory if it is that already."""
    return [to_plain_cpu(tensor)]


def to_plain_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bare elements on the CPU: contiguous, without gradient, lazy negation or conjugation."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def host_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor's own memory if it is on the CPU, else None."""
    return tensor.detach() if tensor.device.type == "cpu" else None


def fill(tensor: torch.Tensor, pieces: Mapping[int, torch.Tensor]) -> None:
    """Fill the tensor from its piece. Raises ValueError if that has another shape or dtype."""
    piece = get_piece(pieces, 0, tuple(tensor.shape), tensor.dtype)
    with torch.no_grad():
        tensor.detach().copy_(piece)


def get_piece(
    pieces: Mapping[int, torch.Tensor], local_index: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return the piece for this local shard. Raises ValueError if it isn't of this shape and dtype."""
    piece = pieces.get(local_index)
    if piece is None:
        raise ValueError(f"no piece for local shard {local_index} among {sorted(pieces)}")
    if tuple(piece.shape) != shape or piece.dtype != dtype:
        raise ValueError(
            f"local shard {local_index} is {dtype} of shape {shape}, the piece {piece.dtype} of {tuple(piece.shape)}"
        )
    return piece


def identity(tensor: torch.Tensor) -> object:
    """Return which memory it uses, and how it views it; None for a tensor without memory."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    address = tensor.data_ptr() if tensor.is_cpu else _device_address(tensor)
    if not address:
        return None
    # A lazy conjugate or negation lies where its original does.
    seen = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, address, seen)


def _device_address(tensor: torch.Tensor) -> object:
    """Return the storage and the offset in it. Not every accelerator has addresses, or even storages."""
    if not torch._C._has_storage(tensor):  # noqa: SLF001 — as torch.serialization does
        return None
    return (tensor.untyped_storage()._cdata, tensor.storage_offset())  # noqa: SLF001 — as above
