"""Values that are no tensors, as bytes and back: a closed list of types, read without running anything."""

import io
import pickle
import re
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from stepkeeper_planners.errors import UnsupportedValueError, ValueDecodeError

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_LIST = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, numpy arrays and scalars, CPU tensors"
)

# What torch.load raises on bytes that it didn't write, depending on where they break.
_DAMAGE = (RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError)


def encode_value(fqn: str, value: object) -> bytes:
    """The value as a torch.save blob, which stock torch reads too.

    Raises:
        UnsupportedValueError: the value, or something in it, is of a type that isn't on the list.
    """
    _check(fqn, value)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def decode_value(fqn: str, data: bytes) -> object:
    """The value that was encoded. No code from the bytes is run.

    Raises:
        ValueDecodeError: the bytes are damaged, or hold a type that isn't on the list.
    """
    try:
        with torch.serialization.safe_globals(numpy_globals()):
            value: object = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, *_DAMAGE) as error:
        # torch's own words go on to recommend reading it unchecked.
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it names {named[1]}, and stored are only: {_LIST}" if named else "the bytes are damaged"
        raise ValueDecodeError(f"{fqn}: the stored value can't be read: {reason}") from error
    return value


def _check(fqn: str, value: object) -> None:
    """Exact types: a subclass would come back as its base, or need its class run to come back at all."""
    kind = type(value)
    if kind in _SCALARS:
        return
    if kind in (dict, OrderedDict):
        assert isinstance(value, dict)
        for key, item in value.items():
            _check(f"{fqn} (a key)", key)
            _check(f"{fqn}[{key!r}]", item)
        return
    if kind in (list, tuple):
        assert isinstance(value, list | tuple)
        for index, item in enumerate(value):
            _check(f"{fqn}[{index}]", item)
        return
    if kind is np.ndarray or isinstance(value, np.generic):
        _check_numpy(fqn, value)
        return
    if isinstance(value, torch.Tensor):
        _check_tensor(fqn, value)
        return
    raise UnsupportedValueError(
        f"{fqn}: a {kind.__module__}.{kind.__qualname__} can't be stored. Stored are: {_LIST}. "
        "Turn it into these, or give it state_dict() and load_state_dict()"
    )


def _check_numpy(fqn: str, value: Any) -> None:
    if value.dtype.hasobject:
        raise UnsupportedValueError(f"{fqn}: a numpy array of Python objects can't be stored; use a list")


def _check_tensor(fqn: str, value: torch.Tensor) -> None:
    if value.device.type != "cpu":
        raise UnsupportedValueError(
            f"{fqn}: a tensor on {value.device} within a tuple is stored as a plain value, which only a CPU tensor "
            "can be; put it into a list or dict"
        )


def numpy_globals() -> list[Any]:
    """What numpy's arrays and scalars name in a pickle: constructors of data, for all dtypes but objects."""
    kinds = [
        getattr(np.dtypes, name)
        for name in np.dtypes.__all__
        if name != "ObjectDType" and isinstance(getattr(np.dtypes, name), type)
    ]
    core: Any = np.zeros(0).__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    # The content of an empty array is written as a call of bytes().
    return [np.ndarray, np.dtype, bytes, core, scalar, *kinds]
