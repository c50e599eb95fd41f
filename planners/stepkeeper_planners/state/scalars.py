"""Recognize at once that many values hold no other values."""

from collections.abc import Collection, Iterable
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

__all__ = ["PLAIN_LEAVES", "SCALARS", "has_plain_leaves_only", "has_scalars_only"]

SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
PLAIN_LEAVES: Final = SCALARS | {torch.Tensor, torch.nn.Parameter, DTensor}
"""Leaves of exactly these types need no further check: nothing in them has to be called or copied."""


def has_scalars_only(values: Collection[Any]) -> bool:
    """Return whether all are scalars. Then no item has to be checked: data loaders keep long lists."""
    return SCALARS.issuperset(map(type, values))


def has_plain_leaves_only(values: Iterable[Any]) -> bool:
    """Return whether all are scalars, or tensors of torch's own classes."""
    return PLAIN_LEAVES.issuperset(map(type, values))
