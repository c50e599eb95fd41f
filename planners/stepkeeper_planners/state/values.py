"""Encode the values of a state, beside its tensors, if their types are on a list. Decode them without running code."""

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import torch

from stepkeeper_planners.errors import UnsupportedValueError, ValueDecodeError
from stepkeeper_planners.pickles.numpy_arrays import explain_unstorable
from stepkeeper_planners.pickles.torch_files import load_torch_bytes

__all__ = ["decode_value", "encode_value", "estimate_value_bytes"]

_SCALARS: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
)
_KEYS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_DICTS: Final = (dict, OrderedDict, Counter)
_LIST: Final = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, Counter, torch.Size, torch.dtype, "
    "torch.device, numpy arrays and scalars, dense CPU tensors"
)
_UNSTORED: Final = frozenset(f"torch.{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8))
"""torch's integer dtypes of less than a byte, which torch.save can't write."""

_MAX_DEPTH: Final = 100


def encode_value(fqn: str, value: object) -> bytes:
    """Encode a value as a torch.save blob, which stock torch reads too.

    Equal values give equal bytes on any rank, if their dicts have the same order.
    A tensor's elements are stored, but not its requires_grad, nor the larger tensor of which it is a view.
    The memory order of an array is not stored. Raises UnsupportedValueError if something in it is of another
    type.
    """
    _check(fqn, value)
    buffer = io.BytesIO()
    torch.save(_strip(value), buffer, pickle_module=_DeterministicPickle)
    return buffer.getvalue()


def estimate_value_bytes(value: object) -> int:
    """Estimate a value's size in bytes. Ranks whose dicts differ only in their order get the same estimate."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(estimate_value_bytes(key) + estimate_value_bytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(estimate_value_bytes, value))
    return 8


def decode_value(fqn: str, data: bytes) -> object:
    """Decode a value that `encode_value` or stock torch encoded. No code from the bytes is run.

    Raises ValueDecodeError if they are damaged, or hold a type that isn't on the list.
    """
    try:
        value = load_torch_bytes(data)
        _check(fqn, value)
    except ValueError as error:
        raise ValueDecodeError(
            f"{fqn}: the stored value can't be read: {error}. Supported types: {_LIST}"
        ) from error
    except UnsupportedValueError as error:
        raise ValueDecodeError(f"the stored value can't be read: {error}") from error
    return value


@final
class _DeterministicPickle:
    """The pickle module that torch.save is given."""

    class Pickler(pickle.Pickler):
        """Write each object out in full: whether two equal strings are one object differs from rank to rank."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fast = True


def _strip(value: object) -> object:
    """Copy a value, with each tensor and array in row-major memory of its own."""
    if isinstance(value, torch.Tensor):
        elements = value.detach().resolve_conj().resolve_neg().contiguous()
        # Copied as bytes: torch stores some dtypes that it can't copy.
        flat = elements.reshape(-1).view(torch.uint8).clone()
        return flat.view(value.dtype).reshape(value.shape)
    if type(value) is np.ndarray:
        return np.asarray(value, order="C")
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        return type(value)(map(_strip, value))
    if type(value) in _DICTS:
        assert isinstance(value, dict)
        return type(value)({key: _strip(item) for key, item in value.items()})
    return value


def _check(fqn: str, value: object) -> None:
    """Check that everything in a value is on the list.

    A container is visited again only at a greater depth. So one that contains itself reaches the greatest depth.
    """
    waiting: list[tuple[str, object, int]] = [(fqn, value, 0)]
    deepest: dict[int, int] = {}
    while waiting:
        name, item, depth = waiting.pop()
        kind = type(item)
        if kind in _SCALARS:
            continue
        if kind in (list, tuple) or kind in _DICTS:
            if id(item) in deepest and depth <= deepest[id(item)]:
                continue
            deepest[id(item)] = depth
            if depth == _MAX_DEPTH:
                raise UnsupportedValueError(f"{fqn}: nested more than {_MAX_DEPTH} deep, or contains itself")
            waiting.extend((*part, depth + 1) for part in _list_parts(name, item))
            continue
        _check_data(name, item)


def _list_parts(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        for index, item in enumerate(value):
            yield f"{name}[{index}]", item
        return
    for key, item in value.items():
        parts = key if type(key) is tuple else (key,)
        for part in parts:
            if type(part) not in _KEYS:
                raise UnsupportedValueError(
                    f"{name}: a {_type_name(part)} can't be a key; use str, int or another plain scalar, or tuples "
                    "of them"
                )
        yield f"{name}[{key!r}]", item


def _check_data(name: str, value: object) -> None:
    """Check a leaf. Only exact types pass: a subclass would be decoded as its base, or need its own code to run."""
    if type(value) is np.ndarray or (isinstance(value, np.generic) and type(value) is value.dtype.type):
        reason = explain_unstorable(value.dtype)
        if reason is None and value.dtype.itemsize == 0 and value.ndim and value.size:
            reason = "a numpy array of items without bytes can't be stored"
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        assert isinstance(value, torch.Tensor)
        reason = _explain_refusal(value)
    else:
        reason = (
            f"a {_type_name(value)} can't be stored. Supported types: {_LIST}. "
            "Convert it to one of these, or give it state_dict() and load_state_dict()"
        )
    if reason is not None:
        raise UnsupportedValueError(f"{name}: {reason}")


def _explain_refusal(tensor: torch.Tensor) -> str | None:
    if tensor.device.type != "cpu":
        return (
            f"a tensor on {tensor.device} within a tuple is stored as a plain value, which only a CPU tensor can be; "
            "put it into a list or dict"
        )
    if tensor.is_quantized:
        return "a quantized tensor can't be stored; store int_repr() and its scales"
    if str(tensor.dtype) in _UNSTORED:
        return f"torch can't store {tensor.dtype}; view it as uint8"
    if str(tensor.dtype) == "torch.float4_e2m1fn_x2" and not tensor.is_contiguous():
        return f"torch can't copy a part of a tensor of {tensor.dtype}; view it as uint8"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "only a dense tensor can be stored"
    return None


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
