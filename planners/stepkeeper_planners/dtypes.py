"""Translate torch's dtypes to names, "float32" without "torch.", and convert elements between dtypes."""

from functools import cache

import torch

from stepkeeper_planners.errors import CastError, LayoutError


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without torch's prefix."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name. Raises LayoutError if this torch has no such dtype."""
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


def cast_elements(fqn: str, elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the same numbers in another dtype; floats and complex numbers are rounded to the nearest.

    Raises CastError, with the tensor's name `fqn`, if a number is out of the dtype's range.
    """
    if elements.dtype == dtype:
        return elements
    cast = elements.to(dtype)
    if any(each.is_floating_point or each.is_complex for each in (elements.dtype, dtype)):
        became_infinite = _finite(elements) & ~_finite(cast)
        fits = not bool(became_infinite.any()) and _in_range(elements, dtype)
    else:
        # An integer that doesn't fit comes back as another one.
        fits = bool((cast.to(elements.dtype) == elements).all())
    if not fits:
        raise CastError(
            f"{fqn}: an element stored as {elements.dtype} is out of the range of {dtype}. Load it as it was stored, "
            "or exclude it"
        )
    return cast


def _in_range(elements: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the elements are in the range of an 8-bit float dtype; True for other dtypes.

    torch 2.15 saturates most of these: numbers out of range become the largest one, and so does infinity if the dtype
    has none. So the converted elements don't show that they were out of range.
    """
    if dtype.itemsize > 1 or elements.is_complex():
        return True
    limits, wide = torch.finfo(dtype), elements.float() if elements.dtype.itemsize == 1 else elements
    # float8_e8m0fnu has only numbers above 0. Zero is rounded to the smallest, and isn't out of range.
    beyond = (wide > limits.max) | (wide < min(limits.min, 0.0))
    has_infinity = torch.tensor(torch.inf).to(dtype).float().isinf()
    if has_infinity:
        beyond &= wide.isfinite()
    return not bool(beyond.any())


def _finite(elements: torch.Tensor) -> torch.Tensor:
    """Mark the finite elements. torch can't do this for most 8-bit dtypes, so they are converted first."""
    return (elements.float() if elements.dtype.itemsize == 1 else elements).isfinite()
