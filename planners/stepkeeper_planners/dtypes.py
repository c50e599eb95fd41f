"""Translate torch's dtypes to the names that layouts, manifests and plans use: "float32", not "torch.float32"."""

import torch

from stepkeeper_planners.errors import LayoutError


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name.

    Raises:
        LayoutError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"torch {torch.__version__} has no dtype named {name!r}")
    return dtype


def all_dtypes() -> dict[str, torch.dtype]:
    """Return this torch's dtypes by name, with aliases: "half" as well as "float16"."""
    return {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


def itemsize_bytes(name: str) -> int:
    """Return the size of one element, in bytes."""
    return dtype_of(name).itemsize
