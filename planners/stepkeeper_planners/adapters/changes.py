"""Sample a tensor, to detect later whether it was changed. Nothing waits for a device."""

import ctypes
from typing import Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

__all__ = ["ChangeMark", "mark_changes"]

_SAMPLE_BYTES: Final = 16
"""The number of bytes that are sampled at the beginning and in the middle of a tensor in host memory."""

_SAMPLES: Final = 4
"""The number of elements that are sampled of a tensor on a device."""


class ChangeMark(NamedTuple):
    """A tensor at one moment."""

    identity: tuple[object, ...]
    """The object, its dtype, and torch's count of changes, which misses changes through `tensor.data`."""

    on_host: bytes = b""
    """Some of its elements."""

    on_device: torch.Tensor | None = None
    """A copy of some of its elements, on their device."""

    def differs_from(self, earlier: "ChangeMark") -> bool:
        """Return True if the tensor has certainly changed since `earlier`, or is another one. Waits for its device."""
        if (self.identity, self.on_host) != (earlier.identity, earlier.on_host):
            return True
        if self.on_device is None or earlier.on_device is None:
            return self.on_device is not earlier.on_device
        mine, theirs = (each.cpu().view(torch.uint8) for each in (self.on_device, earlier.on_device))
        return not torch.equal(mine, theirs)


def mark_changes(tensor: torch.Tensor) -> ChangeMark:
    """Sample a tensor of any kind, in tens of microseconds at most.

    XLA tensors are not read: torch counts their changes, including those through `tensor.data`.
    """
    if is_lazy(tensor):
        return ChangeMark(identity=(id(tensor),))
    # Tensors of inference mode count no changes.
    version = None if tensor.is_inference() else tensor._version  # noqa: SLF001 — torch has no other name
    identity = (id(tensor), tensor.dtype, version)
    if torch._is_functional_tensor(tensor):  # noqa: SLF001 — as torch_xla's tensors are
        return ChangeMark(identity=(*identity, torch._functionalize_mutation_counter(tensor)))  # noqa: SLF001
    memory = _find_memory(tensor)
    if memory is None:
        return ChangeMark(identity=identity)
    if memory.is_cpu:
        return ChangeMark(identity=identity, on_host=_sample_host(memory))
    return ChangeMark(identity=identity, on_device=_sample_device(memory))


def _find_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor's own memory on this rank; None if it has none that can be read as it is."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor  # noqa: SLF001 — to_local() is part of autograd, and waits
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    is_dense = tensor.layout is torch.strided and not tensor.is_meta
    return tensor if is_dense and tensor.numel() else None


def _sample_host(memory: torch.Tensor) -> bytes:
    start, size_bytes = memory.data_ptr(), memory.nbytes
    if not memory.is_contiguous():
        # Only the first element is certainly where the memory starts.
        return ctypes.string_at(start, memory.itemsize)
    if size_bytes <= 2 * _SAMPLE_BYTES:
        return ctypes.string_at(start, size_bytes)
    middle = size_bytes // 2
    return ctypes.string_at(start, _SAMPLE_BYTES) + ctypes.string_at(start + middle, _SAMPLE_BYTES)


def _sample_device(memory: torch.Tensor) -> torch.Tensor:
    if not memory.is_contiguous():
        return memory.detach().as_strided((1,), (1,)).clone()
    return memory.detach().view(-1)[:: max(1, memory.numel() // _SAMPLES)][:_SAMPLES].clone()
