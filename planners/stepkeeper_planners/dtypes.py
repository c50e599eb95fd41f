"""Names of torch's dtypes as they stand in layouts, manifests and plans: "float32", not "torch.float32"."""

import torch

from stepkeeper_planners.errors import LayoutError


def dtype_name(dtype: torch.dtype) -> str:
    """The name without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        LayoutError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"torch {torch.__version__} has no dtype named {name!r}")
    return dtype


def all_dtypes() -> dict[str, torch.dtype]:
    """This torch's dtypes by all names that they have in it: "half" too, which is "float16"."""
    return {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


def itemsize_bytes(name: str) -> int:
    """The bytes of one element."""
    return dtype_of(name).itemsize
