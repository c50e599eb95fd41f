"""Test that what goes into a state comes from one commit, and from what this rank itself knows of the store."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from stepkeeper.checkpoint import BlockReader
from stepkeeper.checkpoint.blocks import Block, BlockTable
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.errors import PeerLostError, RestoreError, TornCheckpointError
from stepkeeper.restore.filling import Filling
from stepkeeper.restore.fit import check_refilled
from stepkeeper.restore.peers.exchange import Exchange
from stepkeeper.restore.peers.links import Links
from stepkeeper.restore.placing import Places
from stepkeeper.time_limits import TimeLimits


class Place:
    """The place of one tensor of four bytes."""

    def __init__(self) -> None:
        self.memory = np.zeros(4, dtype=np.uint8)
        self.n_lacking = 4

    def copy_bytes(self, start: int, data: Any) -> int:
        self.memory[start : start + len(data)] = data
        return len(data)


def test_what_comes_after_the_end_changes_nothing() -> None:
    place = Place()
    places = Places(pieces=cast(Any, (place,)), values={}, by_block=cast(Any, {0: (place,)}))
    table = BlockTable(blocks=(Block(number=0, path="a", index=0, size_bytes=4),), first_numbers={"a": 0})
    filling = Filling(cast(BlockReader, None), table, places)
    filling.put_bytes(0, 0, np.array([7, 7], dtype=np.uint8))
    filling.fail(PeerLostError("another rank has read it bad"))
    with pytest.raises(PeerLostError):
        filling.run({})
    filling.put_bytes(0, 2, np.array([7, 7], dtype=np.uint8))
    assert place.memory.tolist() == [7, 7, 0, 0]


class SecondRank:
    rank = 1
    limits = TimeLimits()


class Passing:
    """Gives what another rank has passed on."""

    def receive_manifests(self, timeout_s: float) -> Sequence[bytes]:
        del timeout_s
        return [b"changed on the way"]


def test_only_what_a_rank_reads_itself_makes_a_manifest_bad() -> None:
    exchange = Exchange(cast(RankGroup, SecondRank()), cast(Links, Passing()))
    in_store = [b"as written"]

    def prove(data: Sequence[bytes]) -> Sequence[Manifest]:
        if list(data) != [b"as written"]:
            raise TornCheckpointError("not what was written")
        return ()

    assert exchange.share_manifests(lambda: in_store, prove) == ()
    in_store[0] = b"bad there too"
    with pytest.raises(TornCheckpointError):
        exchange.share_manifests(lambda: in_store, prove)


def test_nothing_of_a_torn_checkpoint_stays() -> None:
    check_refilled({"a", "b"}, {"a", "b", "c"})
    with pytest.raises(RestoreError, match=r"^b, d: filled in part"):
        check_refilled({"a", "b", "d"}, {"a", "c"})
