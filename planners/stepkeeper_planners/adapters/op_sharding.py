"""Parse XLA's text for a sharding, "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", into boxes and devices. Pure.

Also map devices to ranks: which rank holds a device's shard, and at which local index.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import numpy as np

from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Owner, Ranks

# The number of tiles in each dimension, and of copies last if there are any. Then the devices, as a list of numbers or
# as "<=[4,2]T(1,0)": the numbers from 0 on, in an array of the first shape, with its dimensions in the second order.
_TILED = re.compile(
    r"^\{devices=\[(?P<dims>[\d,]+)\]"
    r"(?:(?P<ids>\d+(?:,\d+)*)|<=\[(?P<iota>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?)"
    r"(?P<replicate>\s*last_tile_dim_replicate|\s*last_tile_dims=\{replicated\})?"
    r"(?:\s*metadata=\{.*\})?\}$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Cut each dimension into tiles of one size; the last ones may be smaller, or empty."""

    counts: tuple[int, ...]
    """The number of tiles along each dimension."""
    groups: tuple[tuple[int, ...], ...]
    """For each tile, in row-major order, the devices that hold a copy."""

    def padded_sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of every device's part, with padding."""
        return tuple(-(-size // count) for size, count in zip(shape, self.counts, strict=True))

    def boxes(self, shape: tuple[int, ...]) -> list[Box]:
        """Return the tiles without padding, in row-major order."""
        tile = self.padded_sizes(shape)
        boxes = []
        for index in np.ndindex(*self.counts):
            starts = [min(i * size, end) for i, size, end in zip(index, tile, shape, strict=True)]
            sizes = [min(size, end - start) for size, end, start in zip(tile, shape, starts, strict=True)]
            boxes.append(Box(offsets=tuple(starts), sizes=tuple(sizes)))
        return boxes

    @property
    def copies(self) -> int:
        """The number of devices that hold each tile."""
        return len(self.groups[0])

    def deduplicated(self, shape: tuple[int, ...]) -> "Tiling | None":
        """Return a tiling with more cuts, in which no two devices hold the same element; None if that isn't even.

        Each device keeps a part of its data, so no communication is needed. Uneven tilings are left alone,
        because the compiler would gather a tensor that comes out of a program in uneven tiles.
        """
        counts = list(self.counts)
        devices = np.array(self.groups).reshape(*counts, self.copies)
        if any(size % count for size, count in zip(shape, counts, strict=True)):
            return None
        for dim, size in enumerate(shape):
            # Cut each tile along `dim` into as many equal parts as its copies allow, each for an equal share of them.
            parts = gcd(size // counts[dim], devices.shape[-1])
            cut = devices.reshape(*counts, parts, -1)
            counts[dim] *= parts
            devices = np.moveaxis(cut, -2, dim + 1).reshape(*counts, -1)
        if devices.shape[-1] > 1:
            return None
        return Tiling(counts=tuple(counts), groups=tuple((int(device),) for device in devices.flatten()))


def parse_sharding(fqn: str, text: str, ndim: int) -> Tiling | None:
    """Return the tiling that the text describes; None if every device holds the whole tensor.

    Raises UnsupportedShardingError if it doesn't determine which device holds what, or its kind is unknown
    here.
    """
    try:
        return _parsed(text, ndim)
    except UnsupportedShardingError as error:
        raise UnsupportedShardingError(f"{fqn}: {error}") from None


# Thousands of tensors have few shardings and few shapes.
@lru_cache(maxsize=1024)
def _parsed(text: str, ndim: int) -> Tiling | None:
    if text in {"", "{replicated}"}:
        return None
    if text.startswith("{manual"):
        raise UnsupportedShardingError(
            "its sharding is MANUAL: only the code that put the data there knows what each device holds. Call "
            "disable_manual_sharding() and save its result"
        )
    match = _TILED.match(text)
    if match is None:
        raise UnsupportedShardingError(f"sharding {text} can't be stored; use mark_sharding()")
    dims = _numbers(match["dims"])
    devices = _devices(match)
    counts, copies = (dims[:-1], dims[-1]) if match["replicate"] else (dims, 1)
    if len(counts) != ndim or prod(dims) != len(devices):
        raise UnsupportedShardingError(f"sharding {text} doesn't fit a tensor of {ndim} dimensions")
    groups = tuple(tuple(devices[i : i + copies]) for i in range(0, len(devices), copies))
    return None if len(groups) == 1 else Tiling(counts=tuple(counts), groups=groups)


@lru_cache(maxsize=1024)
def list_device_boxes(tiling: Tiling, shape: tuple[int, ...]) -> Mapping[int, Box]:
    """Return the box of each device, without padding, for a tensor of this shape."""
    pairs = zip(tiling.groups, tiling.boxes(shape), strict=True)
    return {device: box for group, box in pairs for device in group}


def _devices(match: re.Match[str]) -> list[int]:
    if match["ids"]:
        return _numbers(match["ids"])
    shape = _numbers(match["iota"])
    ids = np.arange(prod(shape)).reshape(shape)
    if match["order"]:
        ids = ids.transpose(_numbers(match["order"]))
    return [int(device) for device in ids.flatten()]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def device_owners(
    local: Sequence[int], everywhere: Sequence[int], process_count: int, ranks: Ranks
) -> dict[int, tuple[Owner, ...]]:
    """Return, for each device of the program, the copies of its shard.

    With one process in the program, each rank runs the whole program on devices of its own, numbered alike;
    they are copies of one another. With several, the ranks are the program's processes, each with its share
    of the devices, in order. Raises UnsupportedShardingError if the devices and ranks fit neither case.
    """
    if process_count == 1:
        return {
            device: tuple(Owner(rank=rank, local_index=index) for rank in range(ranks.world_size))
            for index, device in enumerate(local)
        }
    share = len(everywhere) // process_count
    if process_count != ranks.world_size or list(local) != list(everywhere[ranks.rank * share :][:share]):
        raise UnsupportedShardingError(
            f"rank {ranks.rank} of {ranks.world_size} has devices {list(local)} of {list(everywhere)} in a program of "
            f"{process_count} processes; there must be one rank for each process, in the order of the devices"
        )
    return {
        device: (Owner(rank=position // share, local_index=position % share),)
        for position, device in enumerate(everywhere)
    }
