"""XLA's text of a sharding as tiles and devices."""

import pytest

from stepkeeper_planners.adapters.op_sharding import Tiling, parse_sharding
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.boxes import Box


def parsed(text: str, ndim: int) -> Tiling:
    tiling = parse_sharding("w", text, ndim)
    assert tiling is not None
    return tiling


@pytest.mark.parametrize("text", ["", "{replicated}", "{devices=[1,1,4]0,1,2,3 last_tile_dim_replicate}"])
def test_whole_on_every_device(text: str) -> None:
    assert parse_sharding("w", text, 2) is None


@pytest.mark.parametrize(
    ("text", "counts", "groups"),
    [
        ("{devices=[2,2]0,1,2,3}", (2, 2), ((0,), (1,), (2,), (3,))),
        ("{devices=[2,1,2]2,3,0,1 last_tile_dim_replicate}", (2, 1), ((2, 3), (0, 1))),
        ("{devices=[2,1,2]2,3,0,1 last_tile_dims={replicated}}", (2, 1), ((2, 3), (0, 1))),
        ("{devices=[2,2]<=[4]}", (2, 2), ((0,), (1,), (2,), (3,))),
        ("{devices=[2,2]<=[2,2]T(1,0)}", (2, 2), ((0,), (2,), (1,), (3,))),
        ("{devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate}", (1, 2), ((0, 2), (1, 3))),
        ("{devices=[4,1]0,1,2,3 metadata={op_name=x}}", (4, 1), ((0,), (1,), (2,), (3,))),
    ],
)
def test_tiles(text: str, counts: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> None:
    assert parsed(text, 2) == Tiling(counts=counts, groups=groups)


def test_the_last_tiles_are_short_or_empty() -> None:
    tiling = parsed("{devices=[4]0,1,2,3}", 1)
    assert tiling.padded_sizes((5,)) == (2,)
    assert [b.sizes for b in tiling.boxes((5,))] == [(2,), (2,), (1,), (0,)]
    assert tiling.device_boxes((5,))[2] == Box(offsets=(4,), sizes=(1,))


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", (8, 3)),
        ("{devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate}", (1, 8)),
        ("{devices=[2,2,4]<=[16] last_tile_dim_replicate}", (4, 4)),
        ("{devices=[2,1,6]<=[12] last_tile_dim_replicate}", (4, 9)),
    ],
)
def test_without_copies_each_device_keeps_a_part_of_its_own(text: str, shape: tuple[int, int]) -> None:
    tiling = parsed(text, 2)
    cut = tiling.deduplicated(shape)
    assert cut is not None
    before, after = tiling.device_boxes(shape), cut.device_boxes(shape)
    assert before.keys() == after.keys()
    assert all(before[device].contains(box) for device, box in after.items())
    assert len(set(after.values())) == len(after)
    assert sum(box.volume for box in after.values()) == shape[0] * shape[1]


@pytest.mark.parametrize("shape", [(7, 8), (2, 3), (6, 3)])
def test_copies_that_cannot_be_cut_evenly_stay(shape: tuple[int, int]) -> None:
    assert parsed("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", 2).deduplicated(shape) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{manual}", "MANUAL"),
        ("{maximal device=2}", "maximal"),
        ("{unknown}", "unknown"),
        ("{devices=[2,2]0,1,2}", "2 dimensions"),
        ("{devices=[4]0,1,2,3}", "2 dimensions"),
        ("{{devices=[2,2]0,1,2,3}, {replicated}}", "mark_sharding"),
        ("{devices=[2,1,2]0,1,2,3 last_tile_dims={manual}}", "manual"),
    ],
)
def test_what_says_nothing_of_devices_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(UnsupportedShardingError, match=f"(?s)layer.w.*{words}"):
        parse_sharding("layer.w", text, 2)
