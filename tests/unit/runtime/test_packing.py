"""A rank's share of a save as objects of one size, whatever its tensors are like, and every element once."""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_parts.behind import Behind
from typing_extensions import override

from stepkeeper.checkpoint import SaveOrder, ValueOrder, write_checkpoint
from stepkeeper.checkpoint.dcp_format.dtypes import size_in_bytes
from stepkeeper.checkpoint.dcp_format.tensor_file import lay_out_tensor_file
from stepkeeper.checkpoint.packing import File, pack_order
from stepkeeper.storage.base import Buffer
from stepkeeper.storage.memory import MemoryStore
from stepkeeper_testing.checkpoints import save_order, tensor_order

MIB = 1024 * 1024


def order_of(shapes: list[tuple[int, ...]], values: list[int] | None = None) -> SaveOrder:
    """Tensors of these shapes, in bytes, and values of these lengths, one after the other in memory."""
    tensors, start = [], 0
    for number, shape in enumerate(shapes):
        whole, offsets = tuple(7 + size for size in shape), (3,) * len(shape)
        tensors.append(tensor_order(str(number), whole, offsets=offsets, sizes=shape, start=start))
        start += size_in_bytes("float32", shape)
    orders = []
    for number, length_bytes in enumerate(values or []):
        orders.append(ValueOrder(fqn=f"value {number}", start=start, length_bytes=length_bytes))
        start += length_bytes
    return save_order(tensors, orders, rank=2, world_size=3)


def check_whole(order: SaveOrder, files: tuple[File, ...]) -> None:
    """The pieces are all bytes, once and in order, and boxes that say where in the tensor they are."""
    position = 0
    for item in itertools.chain.from_iterable(file.items for file in files):
        assert item.order.start == position
        if isinstance(item.order, ValueOrder):
            position += item.order.length_bytes
            continue
        piece = item.order
        assert item.length_bytes == lay_out_tensor_file(piece.dtype, piece.sizes).length_bytes
        whole = order.tensors[int(piece.fqn)]
        before = (piece.start - whole.start) // 4
        for axis in reversed(range(len(whole.sizes))):
            before, index = divmod(before, max(whole.sizes[axis], 1))
            assert piece.offsets[axis] == whole.offsets[axis] + index
            assert index + piece.sizes[axis] <= whole.sizes[axis]
        position += size_in_bytes(piece.dtype, piece.sizes)
    assert position == max(
        [
            *(t.start + size_in_bytes(t.dtype, t.sizes) for t in order.tensors),
            *(v.start + v.length_bytes for v in order.values),
            0,
        ]
    )
    for file in files:
        offset = 0
        for item in file.items:
            assert item.offset_bytes == offset
            offset += item.length_bytes


@pytest.mark.parametrize(
    "shapes",
    [
        [(16 * MIB,)],
        [(4096, 4096)],
        [(2, 2, 2 * MIB, 2)],
        [(1, 1, 16 * MIB)],
        [(3, 16 * MIB // 3)],
        [(1000, 1000)] * 16,
        [(8, 1000)] * 2000,
        [(12 * MIB,), (), (17,), (4 * MIB - 17,)],
    ],
)
@pytest.mark.parametrize("streams", [4, 8, 16])
def test_all_that_is_sent_at_once_ends_at_once(shapes: list[tuple[int, ...]], streams: int) -> None:
    order = order_of(shapes, [100, 3000])
    files = pack_order(order, streams=streams, least_bytes=2 * MIB)
    assert [file.name for file in files] == [f"__2_{n}.distcp" for n in range(streams)]
    sizes = [sum(item.length_bytes for item in file.items) for file in files]
    assert max(sizes) < sum(sizes) / streams * 1.03
    check_whole(order, files)


def test_a_share_that_is_small_is_one_object_with_whole_tensors_and_an_empty_one_none() -> None:
    order = order_of([(100, 100)] * 9, [1000])
    (file,) = pack_order(order, streams=16, least_bytes=4 * MIB)
    assert len(file.items) == 10
    assert pack_order(order_of([]), streams=4, least_bytes=MIB) == ()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60), max_size=4).map(tuple), max_size=12),
    st.lists(st.integers(1, 300_000), max_size=5),
    st.integers(1, 9),
)
def test_no_element_is_lost(shapes: list[tuple[int, ...]], values: list[int], streams: int) -> None:
    order = order_of(shapes, values)
    files = pack_order(order, streams=streams, least_bytes=100_000)
    check_whole(order, files)
    assert all(file.items for file in files)
    assert len(files) <= streams * 2 + len(values)


class Streamed(Behind):
    """A store whose writes end only once as many are going on as it wants."""

    streams = 6

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.together = threading.Barrier(self.streams)

    @override
    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self.together.wait(60)
        self.store.write(path, parts)


def test_one_tensor_is_sent_in_as_many_streams_as_the_store_wants() -> None:
    store = Streamed()
    order = replace(order_of([(6 * MIB,)]), rank=0, world_size=1)
    manifest = write_checkpoint(store, order, memoryview(bytes(24 * MIB)))
    assert len(manifest.objects) == 6
    (tensor,) = manifest.tensors
    assert sum(chunk.sizes[0] for chunk in tensor.chunks) == 6 * MIB
