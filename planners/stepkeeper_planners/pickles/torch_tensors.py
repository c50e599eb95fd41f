"""Make dense CPU tensors from the calls that stand for them in a torch.save pickle. The arguments may be hostile."""

from collections.abc import Callable
from math import prod
from typing import Any, Final

import numpy as np
import torch

from stepkeeper_planners.errors import PickleRefusedError
from stepkeeper_planners.pickles.torch_archive import Storage
from stepkeeper_planners.pickles.unpickling import Maker, Name

__all__ = ["TENSOR_CLASS", "TENSOR_MAKERS", "make_with_attributes"]


def _tensor(storage: object, offset: object, sizes: object, strides: object, *rest: object) -> torch.Tensor:
    """Make a tensor. `rest` is requires_grad, the hooks, and perhaps marks of a lazy conjugate or negation."""
    if type(storage) is not Storage or not 2 <= len(rest) <= 3:
        raise PickleRefusedError("a tensor has no storage, or more than its elements")
    return _apply_marks(_view(storage, storage.dtype, offset, (sizes, strides)), rest[2:])


def _typed_tensor(
    storage: object, offset: object, sizes: object, strides: object, *rest: object
) -> torch.Tensor:
    """Make a tensor, with its dtype as the third of `rest`; see `_tensor`."""
    if type(storage) is not Storage or not 3 <= len(rest) <= 4:
        raise PickleRefusedError("a tensor has no storage, or more than its elements")
    dtype = rest[2]
    if type(dtype) is not torch.dtype or dtype in _UNREAD:
        raise PickleRefusedError(f"a tensor has dtype {dtype}")
    return _apply_marks(_view(storage, dtype, offset, (sizes, strides)), rest[3:])


def _apply_marks(tensor: torch.Tensor, marks: tuple[object, ...]) -> torch.Tensor:
    """Apply a conjugate or negation that is stored as a mark."""
    for mark in marks:
        if not mark:
            continue
        # The type comes first, and values are compared by identity: hashing or comparing endlessly nested ones would
        # crash the process.
        if type(mark) is not dict or not {"conj", "neg"}.issuperset(mark):
            raise PickleRefusedError("a tensor has more than its elements")
        if not all(value is True for value in mark.values()):
            raise PickleRefusedError("a tensor has more than its elements")
        tensor = tensor.conj() if "conj" in mark else tensor
        tensor = torch._neg_view(tensor) if "neg" in mark else tensor  # noqa: SLF001 — its one maker
    return tensor


def _view(storage: Storage, dtype: torch.dtype, offset: Any, shape: tuple[Any, Any]) -> torch.Tensor:
    """Return the elements at this offset of the storage, checked: torch would enlarge a storage that is too short."""
    sizes, strides = shape
    are_tuples = type(sizes) is tuple and type(strides) is tuple
    # torch supports no more dimensions than 64.
    if not are_tuples or len(sizes) != len(strides) or len(sizes) > 64:
        raise PickleRefusedError("the shape of a tensor is invalid")
    if not all(type(number) is int and number >= 0 for number in (offset, *sizes, *strides)):
        raise PickleRefusedError("the shape of a tensor is invalid")
    n_items = prod(sizes)
    n_stored = storage.content.numel() // dtype.itemsize
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if n_items and (last >= n_stored or n_items > n_stored):
        raise PickleRefusedError(f"a tensor of shape {sizes} lies outside of its {n_stored} stored elements")
    if not n_items:
        return torch.empty(sizes, dtype=dtype)
    stored = storage.content[: n_stored * dtype.itemsize].view(dtype)
    return stored.as_strided(sizes, strides, offset)


def _parameter(data: object, _requires_grad: object, _hooks: object, *_attributes: object) -> torch.Tensor:
    if type(data) is not torch.Tensor:
        raise PickleRefusedError("a parameter isn't a tensor")
    return data


def _device_tensor(data: object, dtype: object, _device: object, _requires_grad: object) -> torch.Tensor:
    """Make the tensor of an accelerator that torch.save writes from the host, such as XLA's."""
    if type(data) is np.ndarray:
        data = torch.from_numpy(data)
    if type(data) is not torch.Tensor or type(dtype) is not torch.dtype or dtype in _UNREAD:
        raise PickleRefusedError("a tensor of a device isn't made from its elements and their dtype")
    return data.to(dtype)


def make_with_attributes(make: object, kind: object, arguments: object, _attributes: object) -> object:
    """Make a tensor that has Python attributes. A checkpoint doesn't keep them."""
    if type(make) is not Maker or make.name not in TENSOR_MAKERS or type(arguments) is not tuple:
        raise PickleRefusedError("a tensor with attributes isn't made like one")
    if kind is not TENSOR_CLASS:
        raise PickleRefusedError("it holds a tensor of a custom class")
    return TENSOR_MAKERS[make.name](*arguments)


TENSOR_CLASS: Final = object()
TENSOR_MAKERS: Final[dict[Name, Callable[..., torch.Tensor]]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): _device_tensor,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _device_tensor,
}
_UNREAD: Final = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
