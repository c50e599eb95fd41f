"""States to load: on the CPU, the same on every rank."""

from typing import Final

import torch

__all__ = ["STATES", "make_state"]

STATES: Final = ("few large", "many small", "mixed")
MIB: Final = 1024 * 1024


def _sizes_bytes(kind: str, total_bytes: int) -> list[int]:
    match kind:
        case "few large":
            # One of half of it, as an embedding may be.
            return [total_bytes // 2, *[total_bytes // 8] * 4]
        case "many small":
            return [64 * 1024] * (total_bytes // (64 * 1024))
        case _:
            small = [16 * 1024] * 1000
            rest = total_bytes - sum(small)
            return [rest // 2, *[rest // 32] * 16, *small]


def make_state(kind: str, total_bytes: int, seed: int | None) -> dict[str, torch.Tensor]:
    """Random elements; zeros without a seed. Every page of it is in memory."""
    generator = torch.Generator().manual_seed(seed or 0)
    state = {}
    for number, size_bytes in enumerate(_sizes_bytes(kind, total_bytes)):
        tensor = torch.zeros(size_bytes // 4096, 1024)
        if seed is not None:
            bits = tensor.view(torch.int32)
            bits.random_(generator=generator)
        state[f"t{number:05d}"] = tensor
    return state
