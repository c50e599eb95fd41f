"""Chunks of a manifest tile their tensor exactly, or the checkpoint isn't committed."""

import pytest

from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors
from stepkeeper.checkpoint.inventory import ChunkRecord, Inventory, TensorRecord
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.errors import ManifestError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it starts, and how long it is, along each axis."""


def manifest(rank: int, shape: tuple[int, ...], *boxes: Box) -> Manifest:
    chunks = tuple(
        ChunkRecord(
            offsets=offsets, sizes=sizes, path="p", offset_bytes=0, length_bytes=1, data_offset_bytes=0
        )
        for offsets, sizes in boxes
    )
    tensor = TensorRecord(fqn="w", dtype="float32", global_shape=shape, chunks=chunks)
    return Manifest(
        rank=rank,
        world_size=2,
        step=1,
        claim=0,
        nonce="n",
        objects=(),
        inventory=Inventory(tensors=(tensor,)),
    )


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        pytest.param(
            (10,), [((0,), (4,)), ((3,), (4,)), ((8,), (2,))], id="a gap as long as what is there twice"
        ),
        pytest.param((4, 4), [((0, 0), (2, 4)), ((1, 1), (2, 4))], id="outside"),
        pytest.param((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))], id="rows twice"),
        pytest.param((4,), [((0,), (3,))], id="a gap"),
        pytest.param((4,), [((0, 0), (4, 1))], id="of another number of axes"),
    ],
)
def test_chunks_that_dont_tile_are_refused(shape: tuple[int, ...], boxes: list[Box]) -> None:
    with pytest.raises(ManifestError, match=r"'w'.*don't fit together"):
        merge_tensors([manifest(rank, shape, *boxes[rank::2]) for rank in range(2)])


def test_chunks_that_tile_are_taken() -> None:
    pinwheel: list[Box] = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    (tensor,) = merge_tensors([manifest(r, (3, 3), *pinwheel[r::2]) for r in range(2)]).values()
    assert len(tensor.chunks) == 5
    for shape in ((), (0,), (3, 0)):
        assert merge_tensors([manifest(0, shape, ((0,) * len(shape), shape))])
