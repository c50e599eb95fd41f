"""Devices, processes and ranks."""

import pytest

from stepkeeper_planners.adapters.devices import device_owners
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.layout import Owner, Ranks


def owner(rank: int, local_index: int) -> Owner:
    return Owner(rank=rank, local_index=local_index)


def test_one_process_holds_all_devices() -> None:
    owners = device_owners([0, 1], [0, 1], 1, Ranks(rank=0, world_size=1))
    assert owners == {0: (owner(0, 0),), 1: (owner(0, 1),)}


def test_programs_side_by_side_are_copies() -> None:
    for rank in (0, 1):
        owners = device_owners([0, 1], [0, 1], 1, Ranks(rank=rank, world_size=2))
        assert owners == {0: (owner(0, 0), owner(1, 0)), 1: (owner(0, 1), owner(1, 1))}


def test_processes_of_one_program_share_its_devices_out() -> None:
    for rank, local in enumerate([[0, 1], [4, 5]]):
        owners = device_owners(local, [0, 1, 4, 5], 2, Ranks(rank=rank, world_size=2))
        assert owners == {0: (owner(0, 0),), 1: (owner(0, 1),), 4: (owner(1, 0),), 5: (owner(1, 1),)}


@pytest.mark.parametrize(
    ("local", "ranks"),
    [
        ([0, 1], Ranks(rank=1, world_size=2)),
        ([0, 2], Ranks(rank=0, world_size=2)),
        ([0, 1], Ranks(rank=0, world_size=4)),
    ],
    ids=["ranks in another order", "devices not in blocks", "more ranks than processes"],
)
def test_what_doesnt_fit_is_refused_with_the_numbers(local: list[int], ranks: Ranks) -> None:
    with pytest.raises(
        UnsupportedShardingError, match=rf"rank {ranks.rank} of {ranks.world_size}.*2 processes"
    ):
        device_owners(local, [0, 1, 2, 3], 2, ranks)
