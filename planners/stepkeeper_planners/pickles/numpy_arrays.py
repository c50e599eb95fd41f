"""Make numpy's arrays, scalars and dtypes from their bytes alone, as stored in a pickle.

A pickle names `dtype` and `_reconstruct`, and then gives each result its state, as `__setstate__` takes it. Here both
make a `Draft`, and the state makes the object. `unpickle` turns the errors of an invalid state into refusals.
"""

import re
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from stepkeeper_planners.errors import PickleRefusedError
from stepkeeper_planners.pickles.unpickling import Draft, Name

__all__ = ["NUMPY_NAMES", "explain_unstorable"]

_PLAIN: Final = re.compile(r"[?biufc](?:1|2|4|8|16|32)|[SUV][0-9]+|[mM]8")
"""Codes of bools, numbers, strings, void and times: f4, U12, V8, M8."""

_UNIT: Final = re.compile(r"[A-Za-zμ]+")
"""The unit of a dtype of times: s, ns, μs."""


def explain_unstorable(dtype: np.dtype[Any]) -> str | None:
    """Return why an array of this dtype can't be stored; None if it can."""
    if dtype.hasobject or dtype.char == "T":  # T is numpy 2's StringDType
        return "a numpy array of Python objects can't be stored; use a list"
    if _has_metadata(dtype):
        return "a numpy dtype with metadata can't be stored; view the array as a dtype without"
    return None


def _has_metadata(dtype: np.dtype[Any]) -> bool:
    parts = [dtype.base] if dtype.subdtype else [field[0] for field in (dtype.fields or {}).values()]
    return dtype.metadata is not None or any(map(_has_metadata, parts))


_ARRAY_CLASS: Final = object()
"""Stands for the class numpy.ndarray, which pickles pass to `_reconstruct`."""


def _new_dtype(code: object, align: object, copy: object) -> Draft:
    """Begin a dtype, as numpy.dtype(code, align, copy)."""
    if type(code) is not str or type(align) is not bool or type(copy) is not bool:
        raise PickleRefusedError("a numpy dtype isn't made from its name")
    if not _PLAIN.fullmatch(code):
        raise PickleRefusedError(f"it holds numpy data of dtype {code!r}")
    return Draft(partial(_build_dtype, code))


def _build_dtype(code: str, state: object) -> np.dtype[Any]:
    """Build the dtype from the parts of the state alone: numpy would trust sizes and offsets that don't match."""
    if type(state) is not tuple or len(state) not in (8, 9):
        raise PickleRefusedError("the state of a numpy dtype is invalid")
    _, order, sub, names, fields, item_bytes, *_ = state
    dtype: np.dtype[Any]
    if sub is not None:
        # A dtype whose items are arrays.
        base, shape = sub
        dtype = np.dtype((_dtype(base), _shape(shape)))
    elif names is not None:
        # A dtype with named fields. Hashing an endlessly nested name would crash the process.
        if type(fields) is not dict or not all(type(name) is str for name in names):
            raise PickleRefusedError("the fields of a numpy dtype are invalid")
        parts = [fields[name] for name in names]
        dtype = np.dtype(
            {
                "names": list(names),
                "formats": [_dtype(part[0]) for part in parts],
                "offsets": [part[1] for part in parts],
                "itemsize": item_bytes,
            }
        )
    elif code in ("M8", "m8"):
        dtype = np.dtype(code + _unit(state)).newbyteorder(_order(order))
    else:
        dtype = np.dtype(code).newbyteorder(_order(order))
    if dtype.hasobject:
        raise PickleRefusedError("it holds a numpy array of Python objects")
    return dtype


def _unit(state: tuple[Any, ...]) -> str:
    """Return the unit of a dtype of times, with brackets: [ns], [10us]; empty without a unit."""
    _, (unit, number, *_) = state[8]
    name = unit.decode() if type(unit) is bytes else unit
    if name == "generic":
        return ""
    if not _UNIT.fullmatch(name) or type(number) is not int:
        raise PickleRefusedError("it holds numpy times of an unknown unit")
    return f"[{number}{name}]"


def _order(order: object) -> Any:
    if order not in ("<", ">", "|", "="):
        raise PickleRefusedError(f"it holds numpy data of byte order {order!r}")
    return order


def _dtype(value: object) -> np.dtype[Any]:
    if not isinstance(value, np.dtype):
        raise PickleRefusedError(f"expected a numpy dtype, found a {type(value).__name__}")
    return value


def _shape(value: object) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(size) is int and size >= 0 for size in value):
        raise PickleRefusedError("the shape of a numpy array is invalid")
    return value


def _new_array(cls: object, shape: object, kind: object) -> Draft:
    """Begin an array, as numpy's _reconstruct(ndarray, (0,), b"b"). Its state has the shape and the dtype."""
    if cls is not _ARRAY_CLASS or shape != (0,) or kind not in (b"b", "b"):
        raise PickleRefusedError("it holds a numpy array of an unknown kind")
    return Draft(_build_array)


def _build_array(state: object) -> np.ndarray[Any, Any]:
    if type(state) is not tuple or len(state) != 5:
        raise PickleRefusedError("the state of a numpy array is invalid")
    dtype, shape, is_fortran, content = _dtype(state[2]), _shape(state[1]), state[3], state[4]
    n_items = prod(shape)
    if type(content) is not bytes or n_items * dtype.itemsize != len(content):
        raise PickleRefusedError(f"a numpy array of {n_items} {dtype} has the wrong number of bytes")
    if not content:
        if n_items:
            raise PickleRefusedError(f"it holds {n_items} numpy items of 0 bytes")
        return np.empty(shape, dtype)
    flat = np.frombuffer(content, dtype)
    # A copy can be written to, and its size, which is counted, includes its elements.
    return flat.reshape(shape, order="F" if is_fortran is True else "C").copy(order="K")


def _scalar(dtype: object, content: object) -> Any:
    kind = _dtype(dtype)
    if type(content) is not bytes or kind.itemsize != len(content):
        raise PickleRefusedError(f"a numpy {kind} has the wrong number of bytes")
    if not content:
        return kind.type()
    return np.frombuffer(bytearray(content), kind)[0]


# numpy 2 renamed its core.
_CORES: Final = ("numpy._core.multiarray", "numpy.core.multiarray")

NUMPY_NAMES: Final[dict[Name, object]] = {
    ("numpy", "ndarray"): _ARRAY_CLASS,
    ("numpy", "dtype"): _new_dtype,
    **{(core, "_reconstruct"): _new_array for core in _CORES},
    **{(core, "scalar"): _scalar for core in _CORES},
}
