"""A device, a store or a rank that stands still, with no notice, ends what waits for it when its time is over."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest
import torch

from stepkeeper.checkpoint import BlockReader
from stepkeeper.checkpoint.blocks import Block, BlockTable
from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import PeerLostError, SaveError, StorageError
from stepkeeper.restore.filling import Filling, Peers
from stepkeeper.restore.placing import Places
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.job import SaveJob
from stepkeeper.save.persist import persist_save
from stepkeeper.save.request import SaveRequest
from stepkeeper.save.saver import Saver
from stepkeeper.save.snapshot import Region, Snapshot, SnapshotTaker
from stepkeeper.storage.memory import MemoryStore
from stepkeeper.time_limits import TimeLimits
from stepkeeper_planners.geometry.layout import Ranks


class Limited(SoloRankGroup):
    """A rank group that has these limits, and notes how long each of its waits may take."""

    def __init__(self, limits: TimeLimits, world_size: int = 1) -> None:
        super().__init__()
        self.limits = limits  # type: ignore[misc]  # a rank group's own is final
        self.world_size = world_size  # type: ignore[misc]  # as above
        self.waits: dict[str, float] = {}

    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:  # type: ignore[explicit-override]  # Python 3.11 has no typing.override
        self.waits[name] = timeout_s
        return super().broadcast(name, value, timeout_s)

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:  # type: ignore[explicit-override]  # as above
        self.waits[name] = timeout_s
        return super().gather(name, value, timeout_s) * self.world_size


class NoCompanion:
    has_tier = False

    def claim_root(self, **_: object) -> None:
        raise StorageError("none here")

    def ensure_process(self) -> None:
        raise StorageError("none here")


def test_every_wait_of_a_save_has_the_limit_of_what_it_waits_for() -> None:
    limits, region, transferred = TimeLimits(50), Region(), Future[None]()
    limits.record_meeting(20.0)
    limits.record_claim(1.0)
    limits.record_share(10**9, 1.0)
    transferred.set_result(None)
    job = SaveJob(
        name="save/0",
        in_flight=InFlight(7),
        origin=None,
        is_continued=True,
        snapshot=SnapshotTaker(Ranks(rank=0, world_size=2)).take_snapshot({"step": 7}, region),
        region=region,
        transfer=transferred,
    )
    rank_group = Limited(limits, world_size=2)
    with pytest.raises(StorageError):
        persist_save(job, cast(Companion, NoCompanion()), rank_group)
    assert rank_group.waits == {
        "save/0/state": 80,
        "save/0/same": 160,
        "save/0/place": 80 + 3600,
        "save/0/vote": 1800,
        "save/0/outcome": 1800 + 3 * 900,
    }


def test_a_transfer_that_is_stuck_fails_the_save_and_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, regions = threading.Event(), list[Region]()

    def move(_: Snapshot, region: Region) -> None:
        regions.append(region)
        free.wait(60)

    monkeypatch.setattr(Snapshot, "move_copies", move)
    rank_group = Limited(TimeLimits(0.01))
    companion = cast(Companion, NoCompanion())
    saves = Saver(MemoryStore(), companion, rank_group, Progress(lambda _: None), max_pending=1)
    with pytest.raises(StorageError):
        saves.start_save(SaveRequest(step=1, state={"w": torch.zeros(2)})).result(60)
    (stuck,) = regions
    assert all(region is not stuck for region in saves._pipeline._pending._free_regions)
    assert len(saves._pipeline._pending._free_regions) == 1
    free.set()
    saves.close()


def test_copies_that_never_leave_the_devices_are_not_waited_for_without_end() -> None:
    from stepkeeper.save.snapshot.device import DeviceCopies

    copies = DeviceCopies(0, limits=TimeLimits(0.01))
    copies._n_unreleased = 1
    with pytest.raises(SaveError, match="copies of an earlier save are still on the devices"):
        copies.make_copies({}, {}, [])


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
