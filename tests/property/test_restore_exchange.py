"""Any layouts on any number of ranks: every byte that somebody needs is delivered, and read once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planners_parts.parts import bits, boxes_of, random_elements
from thoroughness import scaled

from stepkeeper.checkpoint import blocks as blocks_module
from stepkeeper.checkpoint.blocks import BlockTable, Contents, encode_runs
from stepkeeper.checkpoint.inventory import ChunkRecord, Inventory, TensorRecord
from stepkeeper.checkpoint.manifest import Manifest, ObjectRecord
from stepkeeper.restore.filling import Filling
from stepkeeper.restore.peers.duties import Sharing
from stepkeeper.restore.placing import Bytes, Places, stored_tensor
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout
from stepkeeper_planners.loading.load_request import LoadRequest
from stepkeeper_planners.loading.matching import compare
from stepkeeper_planners.loading.stored_state import StoredState

BLOCK = 64
"""Small, so that everything is cut everywhere."""


def covers(shape: tuple[int, ...]) -> st.SearchStrategy[list[Box]]:
    return boxes_of(shape) if shape else st.just([Box.whole(shape)])


class Objects:
    """The written objects, and how often each byte of them was read."""

    def __init__(self) -> None:
        self.data: dict[str, bytearray] = {}
        self.times: dict[str, np.ndarray[Any, Any]] = {}

    def add(self, path: str, blob: bytes, gap: int) -> int:
        held = self.data.setdefault(path, bytearray())
        held += b"\xff" * gap
        start = len(held)
        held += blob
        return start

    def read_block(self, path: str, block: int) -> bytes:
        start = block * BLOCK
        times = self.times.setdefault(path, np.zeros(len(self.data[path]), dtype=int))
        times[start : start + BLOCK] += 1
        return bytes(self.data[path][start : start + BLOCK])


@st.composite
def stored(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], Objects, Manifest]:
    """Tensors in chunks of any kind in several objects, unaligned as it comes."""
    objects, records, tensors = Objects(), [], {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
        dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]))
        whole = random_elements(shape, dtype, draw(st.integers(0, 999)))
        chunks = []
        for box in draw(covers(shape)):
            path = f"__{draw(st.integers(0, 2))}_0.distcp"
            blob = bits(whole[box.slices])
            start = objects.add(path, blob, draw(st.integers(0, 70)))
            chunks.append(
                ChunkRecord(
                    offsets=box.offsets,
                    sizes=box.sizes,
                    path=path,
                    offset_bytes=start,
                    length_bytes=len(blob),
                    data_offset_bytes=0,
                )
            )
        tensors[f"t{number}"] = whole
        records.append(
            TensorRecord(
                fqn=f"t{number}",
                dtype=str(dtype).removeprefix("torch."),
                global_shape=shape,
                chunks=tuple(sorted(chunks, key=lambda chunk: chunk.offsets)),
            )
        )
    manifest = Manifest(
        rank=0,
        world_size=1,
        step=1,
        claim=0,
        nonce="00",
        objects=tuple(
            ObjectRecord(path=path, size_bytes=len(data), blocks=(0,) * -(-len(data) // BLOCK))
            for path, data in objects.data.items()
        ),
        inventory=Inventory(tensors=tuple(records)),
    )
    return tensors, objects, manifest


class Network:
    """All ranks in one process: what is sent is put at once, in pieces."""

    def __init__(self) -> None:
        self.fillings: list[Filling] = []
        self.sent: set[tuple[int, int]] = set()

    def send_block(self, rank: int, number: int, data: Bytes) -> None:
        assert (rank, number) not in self.sent
        self.sent.add((rank, number))
        for first in range(0, data.size, 23):
            self.fillings[rank].put_bytes(number, first, data[first : first + 23])

    def announce_failure(self, error: BaseException) -> None:
        raise AssertionError from error


@settings(deadline=None, max_examples=scaled(60))
@given(st.data(), stored(), st.integers(1, 4))
def test_whatever_is_where_all_ranks_get_what_they_ask_for_and_each_block_is_read_once(
    data: st.DataObject, saved: tuple[dict[str, torch.Tensor], Objects, Manifest], world_size: int
) -> None:
    tensors, objects, manifest = saved
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(blocks_module, "BLOCK_BYTES", BLOCK)
        contents = Contents.from_manifests([manifest])
        places, states = [], []
        layouts = [
            layout_of(fqn, tensor, data.draw(covers(tuple(tensor.shape))), data, world_size)
            for fqn, tensor in tensors.items()
        ]
        for rank in range(world_size):
            place, state = asked(contents, layouts, Ranks(rank=rank, world_size=world_size))
            places.append(place)
            states.append(state)
        network = Network()
        network.fillings = [Filling(objects, contents.table, each) for each in places]
        deliver(contents.table, places, contents, network)
    for rank, state in enumerate(states):
        for layout in layouts:
            for index, box in layout.local_boxes(rank).items():
                expected = tensors[layout.fqn][box.slices]
                assert bits(state[layout.fqn]) == bits(expected), (rank, layout, index)
    assert all((times <= 1).all() for times in objects.times.values())


def layout_of(
    fqn: str, tensor: torch.Tensor, boxes: list[Box], data: st.DataObject, world_size: int
) -> TensorLayout:
    """Each box on some of the ranks; no rank has two."""
    free = set(range(world_size))
    chunks = []
    for box in boxes:
        ranks = sorted(data.draw(st.sets(st.sampled_from(sorted(free))))) if free else []
        free -= set(ranks)
        if ranks:
            chunks.append(Chunk(box=box, owners=tuple(Owner(rank=rank, local_index=0) for rank in ranks)))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorLayout(fqn=fqn, dtype=dtype, global_shape=tuple(tensor.shape), chunks=tuple(chunks))


def asked(
    contents: Contents, layouts: list[TensorLayout], ranks: Ranks
) -> tuple[Places, dict[str, torch.Tensor]]:
    mine = [layout for layout in layouts if layout.local_boxes(ranks.rank)]
    wanted = LoadRequest(layouts=mine)
    reads, differences = compare(
        wanted,
        StoredState(tensors={fqn: stored_tensor(each) for fqn, each in contents.tensors.items()}),
        ranks,
    )
    assert not differences.missing
    assert not differences.mismatched
    state = {
        layout.fqn: torch.empty(layout.local_boxes(ranks.rank)[0].sizes, dtype=getattr(torch, layout.dtype))
        for layout in mine
    }
    return Places.of(contents, reads, wanted, state, ranks), state


def deliver(table: BlockTable, places: list[Places], contents: Contents, network: Network) -> None:
    """Deliver as the ranks do, at the same time."""
    needs = [encode_runs(each.by_block) for each in places]
    sharing = Sharing.of(needs, table)
    duties = [
        sharing.assign_duties(rank, each.by_block, table, contents.reading_order)
        for rank, each in enumerate(places)
    ]
    for rank, each in enumerate(duties):
        assert set(each.reads) | set(each.receives) == set(places[rank].by_block)
        for number, others in each.reads.items():
            assert all(duties[other].receives[number] == rank for other in others)
    with ThreadPoolExecutor(len(duties)) as ranks:
        runs = [
            ranks.submit(filling.run, each.reads, network)
            for filling, each in zip(network.fillings, duties, strict=True)
        ]
        for run in runs:
            run.result(timeout=60)
