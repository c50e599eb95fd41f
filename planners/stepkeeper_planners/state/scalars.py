"""Recognize values that hold no other values and no tensors."""

from collections.abc import Collection
from typing import Any, Final

__all__ = ["SCALARS", "has_scalars_only"]

SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


def has_scalars_only(values: Collection[Any]) -> bool:
    """Return whether all are scalars. Then no item has to be checked: data loaders keep long lists."""
    return SCALARS.issuperset(map(type, values))
