"""Digest the copies that several ranks hold of one chunk, so that ranks can compare them before one of them is written.

A digest reads each element once, at about the speed of the memory, and copies only small tensors.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from math import prod
from typing import Final

import torch
from torch._C._nn import flatten_dense_tensors

from stepkeeper_planners import adapters
from stepkeeper_planners.dtypes import itemsize_bytes
from stepkeeper_planners.geometry.layout import TensorLayout

__all__ = ["CopyDigests", "HeldCopies", "find_copies", "sample_copy"]

_ROW: Final = 1024
"""Number of 8-byte words that are added up at once. With more, the weights don't stay in the processor's cache."""

_ROW_BYTES: Final = 8 * _ROW
_LARGE_BYTES: Final = 4 * _ROW_BYTES
"""The size from which a chunk is digested in place. Calls for a smaller one take longer than a copy of it."""

_STEP_ROWS: Final = 8192
"""Number of rows that a device multiplies at once, which takes 64 MiB there."""

_DIGEST_BYTES: Final = 16
_N_SAMPLED: Final = 16
_LARGE, _ON_DEVICES = "large", "on devices"
Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCopies:
    """The chunks that this rank and the same other ranks hold."""

    ranks: Ranks
    """All ranks that hold them, in order."""

    large: tuple[tuple[str, int], ...]
    """The name and the local index of each that is digested in place, sorted."""

    small: tuple[tuple[tuple[str, int, int], ...], ...]
    """The same of the others, and the number of elements; those of each dtype together."""

    on_devices: tuple[str, ...]
    """The names of those that XLA devices digest, sorted."""

    @property
    def key(self) -> str:
        """The ranks as text."""
        return ",".join(map(str, self.ranks))


def find_copies(
    layouts: Sequence[TensorLayout], rank: int, on_devices: Container[str] = ()
) -> tuple[HeldCopies, ...]:
    """Find the chunks of which this rank and others hold copies, by the ranks that hold them.

    Args:
        layouts: the layouts of all tensors.
        rank: this rank.
        on_devices: the names of the tensors that XLA devices digest.
    """
    known: dict[int, tuple[Ranks, int]] = {}
    found: dict[Ranks, dict[str, list[tuple[str, int, int]]]] = {}
    for layout in layouts:
        for chunk in layout.chunks:
            holders = known.get(id(chunk.owners))
            if holders is None:
                own = [owner.local_index for owner in chunk.owners if owner.rank == rank]
                ranks = tuple(sorted({owner.rank for owner in chunk.owners})) if own else ()
                holders = known[id(chunk.owners)] = ranks, min(own, default=0)
            if len(holders[0]) > 1 and (size := prod(chunk.box.sizes)):
                is_large = size * itemsize_bytes(layout.dtype) >= _LARGE_BYTES
                kind = _ON_DEVICES if layout.fqn in on_devices else _LARGE if is_large else layout.dtype
                parts = found.setdefault(holders[0], {}).setdefault(kind, [])
                parts.append((layout.fqn, holders[1], size))
    return tuple(
        HeldCopies(
            ranks=ranks,
            large=tuple(sorted((name, index) for name, index, _ in kinds.pop(_LARGE, ()))),
            on_devices=tuple(sorted({name for name, *_ in kinds.pop(_ON_DEVICES, ())})),
            small=tuple(tuple(sorted(kinds[dtype])) for dtype in sorted(kinds)),
        )
        for ranks, kinds in sorted(found.items())
    )


class CopyDigests:
    """The digests of the copies that one rank holds, as of the moment when this was made."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], copies: Sequence[HeldCopies]) -> None:
        """Read the copies. Only what is left to do for their digests is done later, in any thread.

        Args:
            tensors: the tensors by name.
            copies: the result of `find_copies`. What XLA devices digest isn't read here: see `add_digests`.
        """
        self._copies: Final = {each.key: each for each in copies}
        with torch.no_grad():
            self._sums: Final = {
                part: _sum_rows(_read(tensors, *part)) for each in copies for part in each.large
            }
            self._joined: Final = {
                each.key: [
                    _join([_read(tensors, name, index) for name, index, _ in some]) for some in each.small
                ]
                for each in copies
            }
        self._on_devices: dict[str, str] = {}

    def add_digests(self, digests: Mapping[str, str]) -> None:
        """Add the digests in hex digits that XLA devices have made, by name."""
        self._on_devices |= digests

    def combine(self) -> dict[str, str]:
        """Return one digest in hex digits for each set of ranks that hold copies together, by its key.

        Those sets are left out of which the devices' digests have not come.
        """
        return {
            key: _hash(
                chain(*(self._sums[part] for part in each.large), self._joined[key]),
                (self._on_devices[name] for name in each.on_devices),
            )
            for key, each in self._copies.items()
            if self._on_devices.keys() >= {*each.on_devices}
        }

    def list_names(self, key: str) -> dict[str, str]:
        """Return the digest of each tensor of which the ranks of `key` hold copies, by name."""
        each = self._copies[key]
        digests = {name: self._on_devices[name] for name in each.on_devices}
        digests |= {name: _hash(self._sums[name, index]) for name, index in each.large}
        for some, joined in zip(each.small, self._joined[key], strict=True):
            parts = joined.split_with_sizes([size for *_, size in some])
            digests |= {name: _hash([part]) for (name, *_), part in zip(some, parts, strict=True)}
        return digests


def sample_copy(tensor: torch.Tensor) -> list[float]:
    """Return the norm of a tensor's elements on this rank, and some of them."""
    shard = _read_shards(tensor)[0].detach().resolve_conj().resolve_neg()
    numbers = (torch.view_as_real(shard) if shard.is_complex() else shard).reshape(-1).to(torch.float64)
    places = torch.linspace(0, numbers.numel() - 1, min(_N_SAMPLED, numbers.numel()), dtype=torch.float64)
    some: list[float] = numbers[places.long().to(numbers.device)].tolist()
    return [torch.linalg.vector_norm(numbers).item(), *some]


def _read(tensors: Mapping[str, torch.Tensor], name: str, index: int) -> torch.Tensor:
    tensor = tensors[name]
    # Thousands of tensors are, and training waits.
    return tensor if adapters.is_ordinary(tensor) else _read_shards(tensor)[index]


def _read_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    if adapters.is_ordinary(tensor):
        return [tensor.detach()]
    own = adapters.device_memory(tensor)
    return adapters.local_shards(tensor) if own is None else [own]


def _join(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy the shards, of one dtype, into one tensor. It is on the host if they are on several devices."""
    if len(shards) == 1:
        # For one alone, torch's function may return the memory of the shard.
        return shards[0].reshape(-1).clone()
    places: dict[torch.device, list[int]] = {}
    for place, shard in enumerate(shards):
        places.setdefault(shard.device, []).append(place)
    if len(places) == 1:
        return flatten_dense_tensors(list(shards))
    parts = list(shards)
    for some in places.values():
        joined = _join([shards[place] for place in some]).cpu()
        for place, part in zip(
            some, joined.split_with_sizes([shards[place].numel() for place in some]), strict=True
        ):
            parts[place] = part
    return torch.cat(parts)


def _sum_rows(shard: torch.Tensor) -> list[torch.Tensor]:
    """Return a sum of each row of the shard's words, weighted by their places, and the elements of the rest."""
    # Each call here is made for thousands of tensors while training waits.
    flat = shard.resolve_conj().resolve_neg().reshape(-1)
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    n_rest = flat.numel() % (_ROW_BYTES // flat.itemsize)
    rest = [flat[-n_rest:].clone()] if n_rest else []
    rows = (flat[:-n_rest] if n_rest else flat).view(torch.int64).view(-1, _ROW)
    if rows.is_cpu:
        return [torch.mv(rows, _weights()), *rest]
    there = _weights().to(rows.device)  # no device multiplies matrices of integers
    starts = range(0, len(rows), _STEP_ROWS)
    sums = [(rows[start : start + _STEP_ROWS] * there).sum(1) for start in starts]
    return [part.cpu() for part in (torch.cat(sums), *rest)]


@lru_cache(maxsize=1)
def _weights() -> torch.Tensor:
    """Return odd numbers, the same in all processes: a word that differs changes the sum, and so do two that swap."""
    words = b"".join(blake2b(index.to_bytes(4, "big")).digest() for index in range(_ROW // 8))
    return torch.frombuffer(bytearray(words), dtype=torch.int64) | 1


def _hash(parts: Iterable[torch.Tensor], digests: Iterable[str] = ()) -> str:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        plain = part.resolve_conj().resolve_neg().cpu()
        if plain.numel():
            digest.update(plain.view(torch.uint8).numpy().data)
    for known in digests:
        digest.update(bytes.fromhex(known))
    return digest.hexdigest()
