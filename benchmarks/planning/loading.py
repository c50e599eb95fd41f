"""Measure one rank's CPU time for planning a load, by the number of stored chunks, with torch's planner and ours."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from stepkeeper_planners import SPMDLoadPlanner
from stepkeeper_planners.geometry.boxes import Box

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
_TENSORS = 100
_QUADRATIC_UP_TO = 3_000
"""Most chunks where torch's planner compares everything with everything; more would take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint of so many chunks, and what one rank asks of it."""

    name: str
    make: Callable[[int], "Load"]
    torch_up_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The stored boxes of one tensor, and this rank's; of so many tensors alike."""

    shape: tuple[int, ...]
    stored: Sequence[Box]
    local: Sequence[Box]
    n_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds by number of chunks; the power of that number by which they grow."""

    ours_s: dict[int, float]
    torch_s: dict[int, float]

    @property
    def ours_power(self) -> float:
        """About 1 where it grows as the checkpoint does, 2 where everything is compared with everything."""
        return _power(self.ours_s)

    @property
    def torch_power(self) -> float:
        """Exponent of torch's planner, as `ours_power`."""
        return _power(self.torch_s)


def _slabs(length: int, n: int, across: int, axis: int) -> list[Box]:
    """Cut a matrix in n along one axis."""
    edges = [length * i // n for i in range(n + 1)]
    boxes = []
    for start, end in pairwise(edges):
        offsets, sizes = (
            ((start, 0), (end - start, across)) if axis == 0 else ((0, start), (across, end - start))
        )
        boxes.append(Box(offsets=offsets, sizes=sizes))
    return boxes


def _grid(side: int, n: int) -> list[Box]:
    """Cut a square in about n boxes, a bit less even than it could be."""
    per_axis = max(1, math.isqrt(n))
    edges = [side * i // per_axis for i in range(per_axis + 1)]
    spans = list(pairwise(edges))
    return [Box(offsets=(a, c), sizes=(b - a, d - c)) for a, b in spans for c, d in spans]


def _other_axis(n_chunks: int) -> Load:
    n = n_chunks // _TENSORS
    local = [_slabs(1_024, 1_024, 10 * n, axis=1)[5]]
    return Load(shape=(10 * n, 1_024), stored=_slabs(10 * n, n, 1_024, 0), local=local, n_tensors=_TENSORS)


def _eight_devices(n_chunks: int) -> Load:
    n = n_chunks // _TENSORS
    return Load(
        shape=(96 * n, 64),
        stored=_slabs(96 * n, n, 64, 0),
        local=_slabs(96 * n, 8, 64, 0),
        n_tensors=_TENSORS,
    )


def _all_of_one(n_chunks: int) -> Load:
    return Load(
        shape=(4_000, 4_000),
        stored=_grid(4_000, n_chunks),
        local=_grid(4_000, n_chunks * 9 // 10),
        n_tensors=1,
    )


CASES = (
    Case(name="one of 1,024 ranks, cut along the other axis", make=_other_axis, torch_up_to=100_000),
    Case(name="all of it on 8 devices of one rank", make=_eight_devices, torch_up_to=100_000),
    Case(name="one tensor, from one grid into another", make=_all_of_one, torch_up_to=_QUADRATIC_UP_TO),
)


def measure(case: Case, sizes: Sequence[int] = SIZES) -> Measured:
    """Measure the case at every size; torch's planner only as far as it goes in reasonable time."""
    ours_s: dict[int, float] = {}
    torch_s: dict[int, float] = {}
    for n_chunks in sizes:
        load = case.make(n_chunks)
        metadata = _metadata(load)
        state = {name: _local(load) for name in metadata.state_dict_metadata}
        ours_s[n_chunks], n_ours = _timed(partial(_plan, state, metadata))
        if n_chunks <= case.torch_up_to:
            torch_s[n_chunks], n_torch = _timed(partial(_torch_plan, load, metadata))
            assert n_ours <= n_torch, f"{n_ours} reads, {n_torch} of torch's planner"
    return Measured(ours_s=ours_s, torch_s=torch_s)


def report(sizes: Sequence[int] = SIZES) -> Iterator[str]:
    """Print one line for each case and size, and one for how it grows."""
    for case in CASES:
        measured = measure(case, sizes)
        yield f"load plan: {case.name}"
        for n_chunks, ours_s in measured.ours_s.items():
            theirs_s = measured.torch_s.get(n_chunks)
            theirs = "not run" if theirs_s is None else f"{theirs_s:8.3f} s"
            yield f"  {n_chunks:>7,} chunks: ours {ours_s:8.3f} s   torch {theirs}"
        yield f"  grows with n^{measured.ours_power:.2f}, torch's with n^{measured.torch_power:.2f}"


def _plan(state: dict[str, Any], metadata: Metadata) -> int:
    planner = SPMDLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    assert plan.planner_data is None, f"the state doesn't fit: {plan.planner_data}"
    return len(plan.items)


def _torch_plan(load: Load, metadata: Metadata) -> int:
    """Do what DefaultLoadPlanner does for each tensor that is cut into parts."""
    local = [
        ChunkStorageMetadata(offsets=torch.Size(b.offsets), sizes=torch.Size(b.sizes)) for b in load.local
    ]
    return sum(
        len(create_read_items_for_chunk_list(name, stored, local))
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    )


def _metadata(load: Load) -> Metadata:
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(b.offsets), sizes=torch.Size(b.sizes)) for b in load.stored
    ]
    properties, size = TensorProperties(dtype=torch.uint8), torch.Size(load.shape)
    return Metadata(
        {f"layers.{i}.weight": TensorStorageMetadata(properties, size, chunks) for i in range(load.n_tensors)}
    )


def _local(load: Load) -> torch.Tensor:
    """Put this rank's boxes one below the other. No element is touched, so hardly any of it takes memory."""
    ends = list(accumulate(box.sizes[0] for box in load.local))
    local: Any = torch.empty(ends[-1], max(box.sizes[1] for box in load.local), dtype=torch.uint8)
    local.global_shape = load.shape
    local.global_offsets = tuple(box.offsets for box in load.local)
    local.local_sizes = tuple(box.sizes for box in load.local)
    local.local_offsets = tuple((end - box.sizes[0], 0) for end, box in zip(ends, load.local, strict=True))
    return local  # type: ignore[no-any-return]  # torch.Tensor takes any attribute


def _timed(call: Callable[[], int]) -> tuple[float, int]:
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def _power(seconds: dict[int, float]) -> float:
    """Return the slope of a straight line through the logarithms."""
    if len(seconds) < 2:
        return math.nan
    xs, ys = [math.log(n) for n in seconds], [math.log(s) for s in seconds.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


if __name__ == "__main__":
    for line in report():
        print(line, flush=True)
