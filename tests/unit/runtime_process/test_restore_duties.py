"""Test which rank reads what: each block once, by a rank that needs it, and as evenly as can be."""

from stepkeeper.checkpoint.blocks import BlockTable, encode_runs
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, ObjectRecord
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


def test_a_verification_is_spread_by_bytes() -> None:
    table = table_of(3 * BLOCK_BYTES, 1, BLOCK_BYTES + 5)
    shares = [share_of(rank, 2, table) for rank in range(2)]
    assert shares == [[0, 1], [2, 3, 4, 5]]
    assert share_of(0, 1, table) == list(range(6))
    assert share_of(0, 3, table_of()) == []
