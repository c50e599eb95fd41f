"""States of one size and different shapes."""

from typing import Final

import torch

__all__ = ["SHAPES", "new_state"]

SHAPES: Final = ("few large", "many small", "one of half")
_MIB: Final = 1024 * 1024
_SMALL_BYTES: Final = 64 * 1024
_LARGE_TENSORS: Final = 8


def new_state(shape: str, size_mib: int) -> dict[str, torch.Tensor]:
    """Make float32 tensors with 1,024 columns, so that their rows can lie on four devices."""
    size_bytes = size_mib * _MIB
    match shape:
        case "few large":
            parts = [size_bytes // _LARGE_TENSORS] * _LARGE_TENSORS
        case "many small":
            parts = [_SMALL_BYTES] * (size_bytes // _SMALL_BYTES)
        case "one of half":
            parts = [size_bytes // 2] + [_MIB] * (size_mib // 2)
        case _:
            raise ValueError(shape)
    return {f"layer.{index}.weight": torch.ones(part // 4096, 1024) for index, part in enumerate(parts)}
