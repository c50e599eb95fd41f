"""List torch's dtypes by name, without torch."""

from dataclasses import dataclass
from math import prod
from typing import Final

__all__ = ["DTYPES", "Dtype", "find_dtype", "size_in_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """A dtype of torch."""

    name: str
    """The name in torch.<name>."""

    item_bytes: int
    storage: str | None = None
    """The legacy storage class that stands for it in a pickle; None: an untyped storage and the dtype."""


_ROWS: Final[tuple[tuple[str, int, str | None], ...]] = (
    ("bool", 1, "BoolStorage"),
    ("uint8", 1, "ByteStorage"),
    ("int8", 1, "CharStorage"),
    ("int16", 2, "ShortStorage"),
    ("int32", 4, "IntStorage"),
    ("int64", 8, "LongStorage"),
    ("float16", 2, "HalfStorage"),
    ("bfloat16", 2, "BFloat16Storage"),
    ("float32", 4, "FloatStorage"),
    ("float64", 8, "DoubleStorage"),
    ("complex64", 8, "ComplexFloatStorage"),
    ("complex128", 16, "ComplexDoubleStorage"),
    ("complex32", 4, None),
    # Since torch 2.15.
    ("bcomplex32", 4, None),
    ("uint16", 2, None),
    ("uint32", 4, None),
    ("uint64", 8, None),
    ("float8_e4m3fn", 1, None),
    ("float8_e4m3fnuz", 1, None),
    ("float8_e5m2", 1, None),
    ("float8_e5m2fnuz", 1, None),
    ("float8_e8m0fnu", 1, None),
    ("float4_e2m1fn_x2", 1, None),
)
DTYPES: Final = {name: Dtype(name=name, item_bytes=size, storage=storage) for name, size, storage in _ROWS}


def find_dtype(name: str) -> Dtype:
    """Return the dtype of that name. Raises ValueError that lists the known ones."""
    if name not in DTYPES:
        raise ValueError(f"a tensor of dtype {name!r} can't be saved; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def size_in_bytes(dtype: str, sizes: tuple[int, ...]) -> int:
    """Compute the size of a tensor's elements."""
    return find_dtype(dtype).item_bytes * prod(sizes)
