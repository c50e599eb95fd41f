"""Digest XLA tensors on their devices, in the program that copies them for a save, so that nothing waits for digests.

Each element is mixed with its place, and the results are added up. So two ranks that hold copies get equal digests, in
whatever tiles their devices hold them.
"""

# ruff: noqa: SLF001 — torch_xla has no public API for what a checkpoint needs

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, Final

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch_xla.core import xla_op_registry

from stepkeeper_planners.adapters.xla_sharding import unwrap

__all__ = ["read_digests", "start_digests"]

_C: Any = torch_xla._XLAC
_U32: Final = xb.Type.U32
_SEEDS: Final = (0x9E3779B9, 0x7F4A7C15)
_WIDTHS: Final = {1: xb.Type.U8, 2: xb.Type.U16, 4: xb.Type.U32, 8: xb.Type.U64}


def start_digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the pending digests of tensors on this process's devices, as int32 of shape (number of tensors, 2)."""
    return torch.stack([_digest(unwrap(tensor).detach()) for tensor in tensors])


def read_digests(pending: torch.Tensor) -> list[str]:
    """Wait for the digests and return each in hex digits. The GIL is not held."""
    (there,) = _C._xla_get_cpu_tensors([pending])
    return [row.tobytes().hex() for row in there.numpy()]


def _lower_digest(elements: Any, *, width: int, is_complex: bool) -> Any:
    """Define the digest of one tensor's elements in XLA's operations."""
    sizes = tuple(elements.shape().sizes)
    parts = [elements.real(), elements.imag()] if is_complex else [elements]
    words = []
    for part in parts:
        bits = part.bitcast(_WIDTHS[width]) if width else part
        words.append(bits.cast(_U32))
        if width == 8:
            words.append((bits / xb.Op.scalar(bits.builder(), 1 << 32, dtype=_WIDTHS[8])).cast(_U32))
    place = _number_places(words[0], sizes)
    zero = xb.Op.zero(words[0].builder(), dtype=_U32)
    sums = []
    for seed in _SEEDS:
        mixed = place * _scalar(place, 2 * seed + 1) + _scalar(place, seed)
        for word in words:
            mixed = _mix(mixed + word)
        total = mixed.reduce(zero, lambda one, other: one + other, list(range(len(sizes))))
        sums.append(total.reshape((1,)))
    return xb.Op.concat_in_dim(sums, 0).cast(xb.Type.S32)


def _number_places(like: Any, sizes: tuple[int, ...]) -> Any:
    strides = list(accumulate((1, *sizes[:0:-1]), mul))[::-1]
    place = like.zeros_like()
    for dim, stride in enumerate(strides[: len(sizes)]):
        iota = xb.Op.iota(like.builder(), xb.mkshape(_U32, sizes), dim)
        place += iota * _scalar(like, stride)
    return place


def _mix(word: Any) -> Any:
    """Spread each bit over all of the word, as the end of MurmurHash3 does.

    torch_xla's builder has no shift to the right; XLA makes one of the division.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        word = (word ^ (word / _scalar(word, 1 << shift))) * _scalar(word, factor)
    return word


def _scalar(like: Any, value: int) -> Any:
    return xb.Op.scalar(like.builder(), value & 0xFFFFFFFF, dtype=_U32)


_lowered: Final = xla_op_registry.register("stepkeeper_digest", _lower_digest)


def _digest(bare: torch.Tensor) -> torch.Tensor:
    width = bare.itemsize // 2 if bare.is_complex() else bare.itemsize
    digest: torch.Tensor = _lowered(
        bare, width=0 if bare.dtype == torch.bool else width, is_complex=bare.is_complex()
    )
    return digest
