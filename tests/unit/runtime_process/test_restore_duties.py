"""Test which rank reads what: each block once, by a rank that needs it, and as evenly as can be."""

import json

from stepkeeper.checkpoint.blocks import BlockTable, Contents, decode_runs, encode_runs
from stepkeeper.checkpoint.inventory import ChunkRecord, Inventory, TensorRecord
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest, ObjectRecord
from stepkeeper.restore.peers.duties import Sharing
from stepkeeper.restore.verify import share_of


def table_of(*sizes_bytes: int) -> BlockTable:
    return BlockTable.from_objects(
        ObjectRecord(path=f"__{n}_0.distcp", size_bytes=size, blocks=(0,) * -(-size // BLOCK_BYTES))
        for n, size in enumerate(sizes_bytes)
    )


def test_blocks_are_numbered_object_by_object() -> None:
    table = table_of(BLOCK_BYTES + 1, 0, 5)
    assert [(block.path, block.index, block.size_bytes) for block in table.blocks] == [
        ("__0_0.distcp", 0, BLOCK_BYTES),
        ("__0_0.distcp", 1, 1),
        ("__2_0.distcp", 0, 5),
    ]
    assert table.find_blocks("__0_0.distcp", BLOCK_BYTES - 1, 2) == range(2)
    assert table.find_blocks("__0_0.distcp", BLOCK_BYTES, 1) == range(1, 2)
    assert table.find_blocks("__2_0.distcp", 0, 5) == range(2, 3)
    assert not table.find_blocks("__0_0.distcp", 7, 0)


def test_runs_say_the_same_numbers_shortly() -> None:
    assert encode_runs([3, 1, 2, 7]) == [[1, 4], [7, 8]]
    assert encode_runs([]) == []
    assert list(decode_runs([[1, 4], [7, 8]])) == [1, 2, 3, 7]


def test_what_all_need_is_read_once_and_by_all_alike() -> None:
    table = table_of(12 * BLOCK_BYTES)
    needs = [list(range(12))] * 4
    sharing = Sharing.of([encode_runs(each) for each in needs], table)
    duties = [sharing.assign_duties(rank, needs[rank], table, range(12)) for rank in range(4)]
    assert [len(each.reads) for each in duties] == [3] * 4
    assert sorted(number for each in duties for number in each.reads) == list(range(12))
    # Neighbours are read by different ranks, so all of them read and send at all times.
    assert sorted(duties[0].reads) == [0, 4, 8]
    assert duties[1].receives[0] == 0
    assert duties[0].reads[0] == (1, 2, 3)


def test_who_has_most_to_read_alone_reads_least_of_what_several_need() -> None:
    table = table_of(10 * BLOCK_BYTES)
    needs = [range(10), range(6, 10)]
    sharing = Sharing.of([encode_runs(each) for each in needs], table)
    assert sharing.alone_bytes == (6 * BLOCK_BYTES, 0)
    first, second = (sharing.assign_duties(rank, needs[rank], table, range(10)) for rank in range(2))
    assert (len(first.reads), len(second.reads)) == (6, 4)
    assert first.receives == {6: 1, 7: 1, 8: 1, 9: 1}


def test_what_nobody_shares_needs_no_words() -> None:
    table = table_of(*[BLOCK_BYTES] * 3)
    sharing = Sharing.of([[[0, 1]], [[1, 2]], []], table)
    assert not sharing.groups
    assert sharing.assign_duties(1, [1], table, range(3)).reads == {1: ()}
    assert Sharing.decode(json.loads(json.dumps(sharing.encode()))) == sharing


def test_what_several_need_is_read_by_those_that_have_copies() -> None:
    table = table_of(*[2 * BLOCK_BYTES] * 4)
    needs, at_hand = [encode_runs(range(8))] * 3, [[[0, 2]], [], [[0, 1], [4, 6]]]
    sharing = Sharing.decode(json.loads(json.dumps(Sharing.of(needs, table, at_hand).encode())))
    duties = [sharing.assign_duties(rank, range(8), table, range(8)) for rank in range(3)]
    readers = {number: rank for rank, each in enumerate(duties) for number in each.reads}
    assert (readers[1], readers[4], readers[5]) == (0, 2, 2)
    assert readers[0] in (0, 2)
    # What nobody has is read by who has least to read.
    assert [readers[number] for number in (2, 3, 6, 7)].count(1) >= 2
    assert all(each.receives[n] == readers[n] for each in duties for n in range(8) if n not in each.reads)


def test_what_a_thousand_ranks_share_is_told_in_few_words() -> None:
    table = table_of(*[4 * BLOCK_BYTES] * 1000)
    sharing = Sharing.of([[[0, 4000]]] * 1000, table)
    said = json.dumps(sharing.encode()["groups"])
    assert len(said) < 100
    assert len(sharing.assign_duties(999, range(4000), table, range(4000)).reads) == 4


def test_tensors_get_whole_one_after_another_whatever_files_they_lie_in() -> None:
    half = BLOCK_BYTES // 2

    def manifest(rank: int) -> Manifest:
        path = f"__{rank}_0.distcp"
        tensors = [
            TensorRecord(
                fqn=f"t{n}",
                dtype="uint8",
                global_shape=(2 * half,),
                chunks=(
                    ChunkRecord(
                        offsets=(rank * half,),
                        sizes=(half,),
                        path=path,
                        offset_bytes=n * BLOCK_BYTES,
                        length_bytes=half + 64,
                        data_offset_bytes=64,
                    ),
                ),
            )
            for n in range(2)
        ]
        objects = [ObjectRecord(path=path, size_bytes=2 * BLOCK_BYTES, blocks=(0, 0))]
        if rank == 0:
            objects += [
                ObjectRecord(path=name, size_bytes=9, blocks=(0,))
                for name in (".metadata", "manifest.1.json")
            ]
        return Manifest(
            rank=rank,
            world_size=2,
            step=1,
            claim=0,
            nonce="00",
            objects=tuple(objects),
            inventory=Inventory(tensors=tuple(tensors)),
        )

    contents = Contents.from_manifests([manifest(0), manifest(1)])
    assert len(contents.table.blocks) == 4
    assert contents.reading_order == [0, 2, 1, 3]


def test_a_tensor_that_comes_late_in_one_file_is_read_as_a_whole_where_it_comes_early() -> None:
    """Rank 0 wrote three tensors of its own before its half of what both have."""

    def manifest(rank: int, names: tuple[str, ...]) -> Manifest:
        path = f"__{rank}_0.distcp"
        shared = "both"
        tensors = tuple(
            TensorRecord(
                fqn=name,
                dtype="uint8",
                global_shape=(2 * BLOCK_BYTES if name == shared else BLOCK_BYTES,),
                chunks=(
                    ChunkRecord(
                        offsets=(rank * BLOCK_BYTES if name == shared else 0,),
                        sizes=(BLOCK_BYTES,),
                        path=path,
                        offset_bytes=place * BLOCK_BYTES,
                        length_bytes=BLOCK_BYTES,
                        data_offset_bytes=0,
                    ),
                ),
            )
            for place, name in enumerate(names)
        )
        size_bytes = len(names) * BLOCK_BYTES
        objects = (ObjectRecord(path=path, size_bytes=size_bytes, blocks=(0,) * len(names)),)
        return Manifest(
            rank=rank,
            world_size=2,
            step=1,
            claim=0,
            nonce="00",
            objects=objects,
            inventory=Inventory(tensors=tensors),
        )

    contents = Contents.from_manifests([manifest(0, ("a0", "a1", "a2", "both")), manifest(1, ("both", "b1"))])
    assert contents.reading_order == [0, 3, 4, 1, 5, 2]


def test_a_verification_is_spread_by_bytes() -> None:
    table = table_of(3 * BLOCK_BYTES, 1, BLOCK_BYTES + 5)
    shares = [share_of(rank, 2, table) for rank in range(2)]
    assert shares == [[0, 1], [2, 3, 4, 5]]
    assert share_of(0, 1, table) == list(range(6))
    assert share_of(0, 3, table_of()) == []
