"""Tensors of any dtype in any parts, as strategies and as local tensors that say where their parts belong."""

from itertools import pairwise, product
from typing import Any

import torch
from hypothesis import strategies as st

from stepkeeper_planners.geometry.boxes import Box

SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)
DTYPES = [
    torch.bool,
    *(
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
]


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A cover: cut anywhere along each dimension, and some of the parts cut again."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    spans = [list(pairwise(points)) or [(0, 0)] for points in cuts]
    boxes = []
    for cell in product(*spans):
        starts, ends = [a for a, _ in cell], [b for _, b in cell]
        axis = draw(st.integers(0, len(shape) - 1))
        middle = draw(st.integers(starts[axis], ends[axis]))
        for low, high in {(starts[axis], middle), (middle, ends[axis])}:
            offsets, sizes = list(starts), [e - s for s, e in zip(starts, ends, strict=True)]
            offsets[axis], sizes[axis] = low, high - low
            boxes.append(Box(offsets=tuple(offsets), sizes=tuple(sizes)))
    return [box for box in boxes if box.volume] or [Box.whole(shape)]


def random_elements(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, of booleans the two that there are."""
    generator = torch.Generator().manual_seed(seed)
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(
        0, 2 if dtype is torch.bool else 256, (n_bytes,), dtype=torch.uint8, generator=generator
    )
    return bits.view(dtype).reshape(shape)


def parts_of(boxes: list[Box], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """One local tensor with room for all boxes, one below the other, that says where each belongs."""
    rank = len(shape)
    sizes = [max((box.sizes[axis] for box in boxes), default=0) for axis in range(rank)]
    local: Any = torch.zeros(sum(box.sizes[0] for box in boxes), *sizes[1:], dtype=torch.uint8).to(dtype)
    row = 0
    rows = []
    for box in boxes:
        rows.append(row)
        row += box.sizes[0]
    local.global_shape = shape
    local.global_offsets = tuple(box.offsets for box in boxes)
    local.local_sizes = tuple(box.sizes for box in boxes)
    local.local_offsets = tuple((row, *[0] * (rank - 1)) for row in rows)
    return local  # type: ignore[no-any-return]  # torch.Tensor takes any attribute


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def parts_in(local: Any) -> list[tuple[Box, torch.Tensor]]:
    """The parts of such a tensor: which of the whole each is, and its elements."""
    bare = local.as_subclass(torch.Tensor)
    return [
        (Box(offsets=offsets, sizes=sizes), bare[Box(offsets=start, sizes=sizes).slices])
        for offsets, start, sizes in zip(
            local.global_offsets, local.local_offsets, local.local_sizes, strict=True
        )
    ]
