"""A device, a store or a rank that stands still, with no notice, ends what waits for it when its time is over."""

import threading
from typing import Any, cast

import numpy as np
import pytest

from stepkeeper.checkpoint import BlockReader
from stepkeeper.checkpoint.blocks import Block, BlockTable
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import PeerLostError, StorageError
from stepkeeper.restore.filling import Filling, Peers
from stepkeeper.restore.placing import Places
from stepkeeper.time_limits import TimeLimits


class Limited(SoloRankGroup):
    def __init__(self, limits: TimeLimits) -> None:
        super().__init__()
        self.limits = limits  # type: ignore[misc]  # a rank group's own is final


class Place:
    """The place of one tensor of four bytes."""

    n_lacking = 4

    def copy_bytes(self, _start: int, data: Any) -> int:
        return len(data)


@pytest.mark.parametrize(("shared", "error"), [(False, StorageError), (True, PeerLostError)])
def test_a_restore_that_gets_nothing_ends(shared: bool, error: type[Exception]) -> None:
    free = threading.Event()

    class Stuck:
        def read_block(self, path: str, index: int) -> bytes:
            free.wait(60)
            return np.zeros(4, dtype=np.uint8).tobytes()

    class Paused:
        def send_block(self, *_: object) -> None:
            raise AssertionError

        def announce_failure(self, _: BaseException) -> None:
            free.wait(60)

    class Short(TimeLimits):
        silence_s = 0.01

    filling = fill_one_block(Stuck(), Limited(Short()))
    with pytest.raises(error, match="nothing of it has come"):
        filling.run({0: ()}, cast(Peers, Paused()) if shared else None)
    assert not free.is_set()
    free.set()


def test_a_rank_that_waits_for_blocks_of_others_goes_on_while_these_read_their_own() -> None:
    free = threading.Event()

    class Late:
        def read_block(self, path: str, index: int) -> bytes:
            free.wait(60)
            return np.zeros(4, dtype=np.uint8).tobytes()

    class Others:
        def announce_failure(self, error: BaseException) -> None:
            raise error

        def send_block(self, *_: object) -> None:
            raise AssertionError

    class Reading(Limited):
        n_looks = 0

        def read_moved(self) -> int:  # type: ignore[explicit-override]  # Python 3.11 has no typing.override
            self.n_looks += 1
            if self.n_looks == 5:
                free.set()
            return self.n_looks

    class Short(TimeLimits):
        silence_s = 0.01

    rank_group = Reading(Short())
    fill_one_block(Late(), rank_group).run({0: ()}, cast(Peers, Others()))
    assert rank_group.n_looks >= 5


def fill_one_block(reader: object, rank_group: Limited) -> Filling:
    place = Place()
    places = Places(pieces=cast(Any, (place,)), values={}, by_block=cast(Any, {0: (place,)}))
    table = BlockTable(blocks=(Block(number=0, path="a", index=0, size_bytes=4),), first_numbers={"a": 0})
    return Filling(cast(BlockReader, reader), table, places, rank_group=rank_group)
