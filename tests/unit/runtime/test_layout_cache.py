"""Saves that have much in common store what each would store if it were the first."""

import math
from dataclasses import dataclass, field, replace

import pytest

from stepkeeper.checkpoint import (
    LayoutCache,
    SaveOrder,
    Structure,
    ValueOrder,
    finish_checkpoint,
    write_checkpoint,
)
from stepkeeper.checkpoint.dcp_format.metadata import encode_metadata
from stepkeeper.checkpoint.manifest import split_inventory
from stepkeeper.errors import ManifestError
from stepkeeper.storage.memory import MemoryStore
from stepkeeper_testing.checkpoints import save_order, tensor_order

_COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class State:
    """Rows of each tensor, which two ranks share evenly; what else a save is given."""

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
        shapes: dict[str, tuple[int, ...]] = {fqn: (rows, _COLUMNS) for fqn, rows in self.rows.items()}
        if self.last_rank_only is not None and is_last:
            shapes[self.last_rank_only] = ()
        for fqn, shape in shapes.items():
            sizes = tuple(n // world_size if each == axis else n for each, n in enumerate(shape))
            offsets = tuple(rank * n if each == axis else 0 for each, n in enumerate(sizes))
            part = tensor_order(fqn, shape, offsets=offsets, sizes=sizes, start=start, dtype=self.dtype)
            tensors.append(part)
            start += 4 * math.prod(sizes)
        aliases = (self.aliases if rank == 0 else {}) | (self.last_rank_aliases if is_last else {})
        return Structure.build(tensors, aliases=aliases, key_paths=self.key_paths), start

    def order(self, rank: int, step: int, world_size: int) -> SaveOrder:
        structure, start = self.structure(rank, world_size)
        value = ValueOrder(fqn="step", start=start, length_bytes=self.value_bytes)
        values = [value] if rank == 0 else []
        one = save_order([], values, rank=rank, world_size=world_size, step=step, nonce=f"{step:032x}")
        return replace(one, structure=structure)


def stored(
    state: State, step: int, world_size: int, caches: list[LayoutCache] | None = None
) -> dict[str, bytes]:
    """All objects of a save; where there are caches, as companions save that were told the structures."""
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


def test_what_is_the_same_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(*args: object, **options: object) -> bytes:
        made.append(1)
        return encode_metadata(*args, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr("stepkeeper.checkpoint.finishing.encode_metadata", counted)
    caches = [LayoutCache(), LayoutCache()]
    for step in (1, 2, 3):
        stored(FIRST, step, 2, caches)
    assert len(made) == 1
    order = FIRST.order(0, 4, 1)
    layout = caches[0].get_layout(order, streams=8, least_bytes=1)
    again = replace(order, step=5, nonce="5", structure=FIRST.structure(0, 1)[0])
    assert caches[0].get_layout(again, streams=8, least_bytes=1) is layout
    assert caches[0].get_layout(order, streams=4, least_bytes=1) is not layout


def test_metadata_of_parts_that_dont_fit_is_not_kept() -> None:
    cache = LayoutCache()
    store = MemoryStore()
    data = memoryview(bytes(4096))
    for step, state in ((1, State(rows={"w": 4})), (2, State(rows={"w": 4, "b": 2}))):
        own = write_checkpoint(store, state.order(0, step, 2), data, cache=cache)
        other = write_checkpoint(store, State(rows={"w": 6}).order(1, step, 2), data)
        with pytest.raises(ManifestError):
            finish_checkpoint(store, own, [other.make_ref()], cache=cache)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"rank":0,"tensors":[],"values":[]}'])
def test_what_has_no_inventory_in_its_place_is_no_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError, match="here is no manifest"):
        split_inventory(data, "here")
