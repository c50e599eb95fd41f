"""Convert stored elements to the dtype that the state has."""

import torch

from stepkeeper_planners.errors import CastError

__all__ = ["cast_elements"]


def cast_elements(fqn: str, elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the same numbers in another dtype; floats and complex numbers are rounded to the nearest.

    Args:
        fqn: the tensor's name, for the error.
        elements: the stored elements, of any shape.
        dtype: the dtype to convert them to.

    Raises:
        CastError: a number is out of the dtype's range.
    """
    if elements.dtype == dtype:
        return elements
    cast = elements.to(dtype)
    if elements.dtype.is_floating_point or elements.dtype.is_complex:
        fits = bool((_finite(cast) | ~_finite(elements)).all())
    else:
        fits = (
            dtype.is_floating_point or dtype.is_complex or bool((cast.to(elements.dtype) == elements).all())
        )
    if not fits:
        raise CastError(
            f"{fqn}: an element stored as {elements.dtype} is beyond {dtype}. Load it as it was stored, or exclude it"
        )
    return cast


def _finite(elements: torch.Tensor) -> torch.Tensor:
    """Mark the finite elements. torch can't do this for most 8-bit dtypes, so they are converted first."""
    return (elements.float() if elements.dtype.itemsize == 1 else elements).isfinite()
