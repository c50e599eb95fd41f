"""A rank's share of a save: objects of one size, every element once, and the same bytes after any save."""

import itertools
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_parts.behind import Behind
from typing_extensions import override

from stepkeeper.checkpoint.dcp_format.dtypes import size_in_bytes
from stepkeeper.checkpoint.dcp_format.tensor_file import lay_out_tensor_file
from stepkeeper.checkpoint.finishing import finish_checkpoint
from stepkeeper.checkpoint.layout_cache import LayoutCache
from stepkeeper.checkpoint.orders import SaveOrder, Structure, ValueOrder
from stepkeeper.checkpoint.packing import File, pack_order
from stepkeeper.checkpoint.writing import write_checkpoint
from stepkeeper.errors import ManifestError
from stepkeeper.storage.base import Buffer
from stepkeeper_testing.checkpoints import save_order, tensor_order
from stepkeeper_testing.memory import MemoryStore

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
    """The pieces are all bytes, once and in order, and their boxes are their places in the tensor."""
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
    """A store whose writes end only once a given number of them are running."""

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


@dataclass(frozen=True, kw_only=True)
class State:
    """Rows of each tensor, which two ranks share evenly, and the other inputs of a save."""

    rows: dict[str, int]
    dtype: str = "float32"
    value_bytes: int = 3
    aliases: dict[str, str] = field(default_factory=dict)
    key_paths: dict[str, list[str]] = field(default_factory=dict)
    split_by_columns: bool = False
    last_rank_only: str | None = None
    """A tensor that the last rank writes, of which the others know nothing."""

    last_rank_aliases: dict[str, str] = field(default_factory=dict)

    def structure(self, rank: int, world_size: int) -> tuple[Structure, int]:
        """Return what this rank writes, and how many bytes of tensors that is."""
        tensors, start, is_last = [], 0, rank == world_size - 1
        axis = int(self.split_by_columns)
        shapes: dict[str, tuple[int, ...]] = {fqn: (rows, 8) for fqn, rows in self.rows.items()}
        if self.last_rank_only is not None and is_last:
            shapes[self.last_rank_only] = ()
        for fqn, shape in shapes.items():
            sizes = tuple(n // world_size if each == axis else n for each, n in enumerate(shape))
            offsets = tuple(rank * n if each == axis else 0 for each, n in enumerate(sizes))
            part = tensor_order(fqn, shape, offsets=offsets, sizes=sizes, start=start, dtype=self.dtype)
            tensors.append(part)
            start += 4 * math.prod(sizes)
        aliases = (self.aliases if rank == 0 else {}) | (self.last_rank_aliases if is_last else {})
        return Structure(tensors=tuple(tensors), aliases=aliases, key_paths=json.dumps(self.key_paths)), start

    def order(self, rank: int, step: int, world_size: int) -> SaveOrder:
        structure, start = self.structure(rank, world_size)
        value = ValueOrder(fqn="step", start=start, length_bytes=self.value_bytes)
        values = [value] if rank == 0 else []
        one = save_order([], values, rank=rank, world_size=world_size, step=step, nonce=f"{step:032x}")
        return replace(one, structure=structure)


def stored(
    state: State, step: int, world_size: int, caches: list[LayoutCache] | None = None
) -> dict[str, bytes]:
    """All objects of a save; with caches, as companions save that have received the structures."""
    store = MemoryStore()
    orders, manifests = [], []
    for rank in range(world_size):
        order = state.order(rank, step, world_size)
        cache = None if caches is None else caches[rank]
        if cache is not None:
            cache.hold_structure(Structure.from_text(order.structure.text))
            held = cache.find_structure(order.structure.key)
            assert held is not None
            order = replace(order, structure=held)
        data = bytes((step + rank + place) % 251 for place in range(4096))
        manifests.append(write_checkpoint(store, order, memoryview(data), cache=cache))
        orders.append(order)
    own, *others = manifests
    finish_checkpoint(
        store,
        own,
        [each.make_ref() for each in others],
        structure=orders[0].structure,
        cache=None if caches is None else caches[0],
    )
    return store.bucket.objects


FIRST = State(rows={"w": 4, "b": 2})
CHANGED = {
    "nothing": FIRST,
    "a name": State(rows={"w": 4, "c": 2}),
    "the order": State(rows={"b": 2, "w": 4}),
    "a size": State(rows={"w": 4, "b": 6}),
    "a type": replace(FIRST, dtype="int32"),
    "a value's length": replace(FIRST, value_bytes=4),
    "a tied tensor": replace(FIRST, aliases={"tied": "w"}),
    "what a tied tensor stands for": replace(FIRST, aliases={"tied": "b"}),
    "the nesting": replace(FIRST, key_paths={"w": ["w"]}),
    "what another rank writes": replace(FIRST, last_rank_only="more"),
    "what another rank calls it": replace(FIRST, last_rank_aliases={"tied": "b"}),
    "the placement": replace(FIRST, split_by_columns=True),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED.keys())
def test_what_an_earlier_save_has_left_changes_nothing_that_is_stored(
    changed: State, world_size: int
) -> None:
    caches = [LayoutCache() for _ in range(world_size)]
    tied = replace(FIRST, aliases={"tied": "w"})
    for step, state in enumerate((FIRST, tied, changed, changed, FIRST), 1):
        assert stored(state, step, world_size, caches) == stored(state, step, world_size)


def test_metadata_of_parts_that_dont_fit_is_not_kept() -> None:
    cache = LayoutCache()
    store = MemoryStore()
    data = memoryview(bytes(4096))
    for step, state in ((1, State(rows={"w": 4})), (2, State(rows={"w": 4, "b": 2}))):
        own = write_checkpoint(store, state.order(0, step, 2), data, cache=cache)
        other = write_checkpoint(store, State(rows={"w": 6}).order(1, step, 2), data)
        with pytest.raises(ManifestError):
            finish_checkpoint(store, own, [other.make_ref()], cache=cache)
