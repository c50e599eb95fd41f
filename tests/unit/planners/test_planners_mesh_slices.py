"""A tensor of one name on several slices of a mesh is written from one of them."""

from random import Random

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout
from stepkeeper_planners.geometry.mesh_slices import list_mesh_slices
from stepkeeper_planners.saving.assignment import assign

SLICES = ((0, 1), (2, 3))


def on_slices(fqn: str, n_rows: int, *holders: tuple[int, ...]) -> TensorLayout:
    """Make as many chunks as there are holders."""
    size = n_rows // len(holders)
    chunks = tuple(
        Chunk(
            box=Box(offsets=(size * i,), sizes=(size,)),
            owners=tuple(Owner(rank=r, local_index=0) for r in ranks),
        )
        for i, ranks in enumerate(holders)
    )
    return TensorLayout(
        fqn=fqn, dtype="float32", global_shape=(size * len(holders),), chunks=chunks, mesh_slices=SLICES
    )


def test_slices_are_the_columns_of_a_mesh() -> None:
    assert list_mesh_slices((0, 2, 1, 3), 2) == SLICES
    assert list_mesh_slices((0, 1), 1) == ()
    assert list_mesh_slices((4, 6, 5, 7), 2, (7, 6, 5, 4)) == ((0, 1), (2, 3))


def test_no_tensor_is_mixed_of_slices_and_slices_take_turns() -> None:
    layouts = [on_slices(f"cut{i}", 200_000 + i * 1000, (0, 2), (1, 3)) for i in range(6)]
    layouts += [on_slices(f"whole{i}", 300_000 + i * 1000, (0, 1, 2, 3)) for i in range(6)]
    found = assign(layouts, 4)
    writers: dict[str, set[int]] = {}
    for rank in range(4):
        for write in found.list_writes(rank):
            writers.setdefault(write.fqn, set()).add(rank)
    assert writers.keys() == {layout.fqn for layout in layouts}
    assert all(ranks <= {0, 1} or ranks <= {2, 3} for ranks in writers.values())
    loads = [sum(write.size_bytes for write in found.list_writes(rank)) for rank in range(4)]
    assert max(loads) <= 1.05 * sum(loads) / 4
    Random(1).shuffle(layouts)
    assert [assign(layouts, 4).list_writes(rank) for rank in range(4)] == [
        found.list_writes(rank) for rank in range(4)
    ]


def test_where_ranks_of_one_slice_only_have_the_tensor_they_write_it() -> None:
    layout = on_slices("stage", 100, (2,), (3,))
    assert [len(assign([layout], 4).list_writes(rank)) for rank in range(4)] == [0, 0, 1, 1]
    crossed = on_slices("crossed", 100, (0,), (3,))
    assert [len(assign([crossed], 4).list_writes(rank)) for rank in range(4)] == [1, 0, 0, 1]
