"""A restore's bytes: who reads which, how they go between ranks, and what a bad or a missing one means."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any, cast

import numpy as np
import pytest

from stepkeeper.checkpoint.blocks import Block, BlockTable
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.checkpoint.reading import BlockReader
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.errors import PartlyRestoredError, PeerLostError, TornCheckpointError
from stepkeeper.restore.filling import Filling
from stepkeeper.restore.fit import check_refilled
from stepkeeper.restore.peers.exchange import Exchange
from stepkeeper.restore.peers.frames import FRAME_BYTES, Kind, receive_frame, send_frame
from stepkeeper.restore.peers.links import Links, PeerStoppedError
from stepkeeper.restore.placing import Bytes, Places
from stepkeeper.time_limits import TimeLimits


@pytest.mark.parametrize(
    "place", [-3, 0, 1, 9, 17, 21], ids=["data", "kind", "number", "first", "length", "checksum"]
)
def test_what_changes_on_the_way_is_refused_bytes_and_where_they_belong(place: int) -> None:
    one, other = socket.socketpair()
    with one, other:
        send_frame(one, Kind.BLOCK, 0, 0, b"elements")
        sent = bytearray(other.recv(1000))
        sent[place] ^= 2
        one.sendall(sent + bytes(8))
        with pytest.raises(ConnectionError, match="changed in transit"):
            receive_frame(other, bytearray(FRAME_BYTES))


def linked(secrets: tuple[bytes, bytes]) -> tuple[Links, Links]:
    """Two ranks of this process; rank 1 has called rank 0."""
    links = tuple(
        Links(rank, lambda lost, why: PeerLostError(f"rank {lost} is lost: {why}")) for rank in range(2)
    )
    addresses = [{"hosts": ["127.0.0.1"], "port": each.port} for each in links]
    links[0].start(secrets[0], relayed_to=(1,))
    links[1].start(secrets[1], relayed_to=())
    try:
        links[1].connect_to((0,), addresses)
    except OSError:
        for each in links:
            each.close()
        raise
    links[0].await_peers((1,))
    return links[0], links[1]


def test_who_does_not_know_the_secret_is_refused() -> None:
    with pytest.raises(ConnectionError, match=r"can't reach rank 0.*is not rank 0 of this training"):
        linked((b"one" * 10, b"other" * 6))


def test_another_rank_at_the_port_that_one_is_said_to_have_is_not_taken_for_it() -> None:
    """Hosts give their ports independently: 127.0.0.1 and the other host's port may be a rank of this host."""
    links = [Links(rank, lambda lost, why: PeerLostError(f"rank {lost} is lost: {why}")) for rank in range(3)]
    for each in links:
        each.start(b"s" * 32, relayed_to=())
    address = {"hosts": ["127.0.0.1"], "port": links[1].port}
    with pytest.raises(ConnectionError, match=r"is not rank 0 of this training"):
        links[2].connect_to((0,), [address, address])
    for each in links:
        each.close()


class Heard:
    """Record what came to one of them."""

    def __init__(self, links: Links) -> None:
        self.data = bytearray()
        self.failures: Queue[Exception] = Queue()
        links.deliver_to(self.put, self.failures.put)

    def put(self, number: int, first: int, data: Bytes) -> None:
        assert (number, first) == (3, len(self.data))
        self.data += data.tobytes()


def test_who_leaves_without_a_word_is_lost_and_who_says_so_is_not() -> None:
    first, second = linked((b"s" * 32, b"s" * 32))
    heard = Heard(first), Heard(second)
    first.close(announced=False)
    with pytest.raises(PeerLostError, match="rank 0 is lost: "):
        raise heard[1].failures.get(timeout=30)
    assert heard[0].failures.empty()
    with pytest.raises(PeerLostError, match="rank 0 is lost: "):
        second.send_block(0, 3, np.zeros(5, dtype=np.uint8))
    second.close()

    first, second = linked((b"s" * 32, b"s" * 32))
    heard = Heard(first), Heard(second)
    first.close()
    second.close()
    assert all(each.failures.empty() for each in heard)


class Place:
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
    with pytest.raises(PartlyRestoredError, match=r"^b, d: partly filled"):
        check_refilled({"a", "b", "d"}, {"a", "c"})


def test_manifests_and_blocks_arrive_whole_and_then_what_failed() -> None:
    first, second = linked((b"s" * 32, b"s" * 32))
    manifests = [b"{}", b"m" * (2 * FRAME_BYTES + 5)]
    with ThreadPoolExecutor(1) as threads:
        came = threads.submit(second.receive_manifests, 30)
        first.send_manifests(manifests)
        assert came.result(30) == manifests
    heard = Heard(first)
    block = np.arange(3 * FRAME_BYTES + 1, dtype=np.uint8)
    second.send_block(0, 3, block)
    second.announce_failure(ValueError("its disk is full"))
    with pytest.raises(PeerStoppedError, match="rank 1: its disk is full"):
        raise heard.failures.get(timeout=30)
    assert heard.data == block.tobytes()
    for each in (first, second):
        each.close()
