"""Test what a rank's items become, and what `.metadata` says of them."""

import io
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from stepkeeper.checkpoint import SaveOrder, Structure
from stepkeeper.checkpoint.inventory import ChunkRecord, Inventory, ValueRecord
from stepkeeper.checkpoint.layout_cache import build_inventory
from stepkeeper.checkpoint.manifest import Manifest, ObjectRecord
from stepkeeper.checkpoint.packing import pack_order
from stepkeeper.checkpoint.writing import build_manifest
from stepkeeper.dcp.shares import Share, WrittenItem, add_storage_places, join_manifests
from stepkeeper.errors import SaveError
from stepkeeper_planners.saving.global_metadata import GlobalMetadata


def make_tensor_item(fqn: str, tensor: torch.Tensor) -> WriteItem:
    size = tensor.shape
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=tensor.dtype), size=size)
    return WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.TENSOR, tensor_data=data)


def make_value_item(fqn: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)


class Planner:
    """Has these tensors and values, and counts who is asked for how often."""

    def __init__(self, **held: Any) -> None:
        self.held = held
        self.asked: list[str] = []

    def resolve(self, item: WriteItem) -> Any:
        self.asked.append(item.index.fqn)
        return self.held[item.index.fqn]

    def items(self) -> list[WriteItem]:
        return [
            make_tensor_item(fqn, value) if isinstance(value, torch.Tensor) else make_value_item(fqn)
            for fqn, value in self.held.items()
        ]


def order_of(share: Share) -> SaveOrder:
    return SaveOrder(
        rank=3,
        world_size=1,
        step=0,
        claim=0,
        nonce="a",
        structure=Structure.build(share.tensors),
        values=share.values,
    )


def test_tensors_are_asked_for_once_when_they_are_written_and_let_go() -> None:
    planner = Planner(w=torch.arange(40, dtype=torch.float64).reshape(5, 8).t(), n=io.BytesIO(b"value"))
    share = Share(planner.items(), planner.resolve)
    assert planner.asked == ["n"]
    (order,), (value,) = share.tensors, share.values
    assert bytes(share[value.start : value.start + 5]) == b"value"
    whole = planner.held["w"].contiguous().view(torch.uint8).numpy().tobytes()
    assert bytes(share[order.start : order.start + 64]) == whole[:64]
    assert bytes(share[order.start + 64 : order.start + 320]) == whole[64:]
    assert planner.asked == ["n", "w"]


def test_each_item_has_its_pieces_also_what_was_cut_and_what_is_empty() -> None:
    planner = Planner(
        none=torch.zeros(0, 3),
        cut=torch.zeros(100_000),
        also_none=torch.zeros(2, 0),
        nothing=io.BytesIO(),
        n=io.BytesIO(b"value"),
    )
    share = Share(planner.items(), planner.resolve)
    files = pack_order(order_of(share), streams=3, least_bytes=64 * 1024)
    manifest = build_manifest(order_of(share), build_inventory(files), ())
    written = {item.index.fqn: each for item, each in share.locate_items(files, manifest)}
    cut = [piece for piece in written["cut"].pieces if isinstance(piece, ChunkRecord)]
    assert len(cut) > 1
    assert sum(piece.sizes[0] for piece in cut) == 100_000
    assert [piece.offsets[0] for piece in cut] == sorted(piece.offsets[0] for piece in cut)
    assert len({piece.path for piece in cut}) == len(cut)
    for name in ("none", "also_none"):
        (piece,) = written[name].pieces
        assert isinstance(piece, ChunkRecord)
        assert 0 in piece.sizes
    for name, length_bytes in (("n", 5), ("nothing", 0)):
        (value,) = written[name].pieces
        assert isinstance(value, ValueRecord)
        assert (value.fqn, value.length_bytes) == (name, length_bytes)
    assert [name for name, each in written.items() if each.manifest] == ["none"]


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(5, dtype=torch.int32)])
def test_a_planner_that_gives_something_else_is_refused(other: torch.Tensor) -> None:
    planner = Planner(w=torch.zeros(5))
    share = Share(planner.items(), planner.resolve)
    planner.held["w"] = other
    with pytest.raises(SaveError, match=r"w: the planner said float32\[5\] and gave"):
        share[0:20]


def chunk(offset: int, size: int, path: str) -> ChunkRecord:
    return ChunkRecord(
        offsets=(offset,), sizes=(size,), path=path, offset_bytes=8, length_bytes=99, data_offset_bytes=64
    )


def entry(*chunks: tuple[int, int]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.float32),
        size=torch.Size([6]),
        chunks=[ChunkStorageMetadata(torch.Size([start]), torch.Size([size])) for start, size in chunks],
    )


def test_what_was_cut_are_chunks_of_their_own_under_each_name_of_a_tied_tensor() -> None:
    tied = entry((0, 4), (4, 2))
    planned = GlobalMetadata(
        state_dict_metadata={"w": tied, "also": tied, "n": BytesStorageMetadata()},
        planner_data={"w": ("w",)},
        aliases={"also": "w"},
    )
    written = {
        MetadataIndex("w", torch.Size([0])): WrittenItem(pieces=(chunk(0, 3, "a"), chunk(3, 1, "b"))),
        MetadataIndex("w", torch.Size([4])): WrittenItem(pieces=(chunk(4, 2, "c"),)),
        MetadataIndex("n"): WrittenItem(
            pieces=(ValueRecord(fqn="n", path="c", offset_bytes=0, length_bytes=5),)
        ),
    }
    placed = add_storage_places(planned, written)
    assert type(placed) is Metadata
    for name in ("w", "also"):
        stored = placed.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        assert [tuple(each.offsets) + tuple(each.sizes) for each in stored.chunks] == [(0, 3), (3, 1), (4, 2)]
        places = [placed.storage_data[MetadataIndex(name, each.offsets)] for each in stored.chunks]
        assert [place.relative_path for place in places] == ["a", "b", "c"]
    assert placed.storage_data[MetadataIndex("n")].length == 5
    assert placed.planner_data == {"w": ("w",)}
    # A planner that keeps its metadata for the next save finds it as it was.
    assert tied == entry((0, 4), (4, 2))
    assert type(planned) is GlobalMetadata


def test_the_manifest_of_all_ranks_stands_alone() -> None:
    manifests = [
        Manifest(
            rank=rank,
            world_size=1,
            step=0,
            claim=0,
            nonce=str(rank),
            objects=(ObjectRecord(path=f"__{rank}_0.distcp", size_bytes=3, blocks=(1,)),),
            inventory=Inventory(),
        )
        for rank in range(2)
    ]
    written = [WrittenItem(pieces=(), manifest=manifest) for manifest in manifests] + [WrittenItem(pieces=())]
    own = ObjectRecord(path=".metadata", size_bytes=3, blocks=(1,))
    joined = join_manifests(written, nonce="save", more=(own,))
    assert (joined.rank, joined.world_size, joined.nonce) == (0, 1, "save")
    assert [each.path for each in joined.objects] == ["__0_0.distcp", "__1_0.distcp", ".metadata"]
