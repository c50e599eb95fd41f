"""Test a file system that shows other hosts' writes a minute late, as NFS may: nothing is lost, or counts as lost."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

import pytest
from store_parts.behind import Behind
from typing_extensions import override

from stepkeeper.checkpoint.finishing import finish_checkpoint, verify_objects
from stepkeeper.checkpoint.reading import read_manifests
from stepkeeper.checkpoint.writing import write_checkpoint
from stepkeeper.errors import FencedError, MissingObjectError
from stepkeeper.log import Log
from stepkeeper.storage.base import Buffer, ObjectStat
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import save_small, small_order
from stepkeeper_testing.memory import MemoryBucket, MemoryStore

LATE_S: Final = 60.0


@final
class Host(Behind):
    """A put is decided by the server at once; other hosts' objects appear here after a while."""

    def __init__(self, world: "World", number: int) -> None:
        super().__init__(MemoryStore(world.bucket))
        self._world, self._number = world, number
        self.log = Log(self, patience=world.patience)

    @override
    def put_if_absent(self, path: str, data: bytes) -> bool:
        won = super().put_if_absent(path, data)
        if won:
            self._world.written[path] = self._number, self._world.now_s
        return won

    @override
    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self._world.written.setdefault(path, (self._number, self._world.now_s))
        super().write(path, parts)

    @override
    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if not self._shown(path):
            raise MissingObjectError(f"{path} isn't shown yet")
        return super().read(path, offset, length)

    @override
    def list(self, prefix: str) -> list[ObjectStat]:
        return [stat for stat in super().list(prefix) if self._shown(stat.path)]

    def _shown(self, path: str) -> bool:
        number, put_s = self._world.written.get(path, (self._number, 0.0))
        return number == self._number or self._world.now_s >= put_s + LATE_S


@dataclass
class World:
    """One server, several hosts, and a time that passes only while a host waits."""

    bucket: MemoryBucket = field(default_factory=MemoryBucket)
    now_s: float = 0.0
    written: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By whom, and when."""

    def __post_init__(self) -> None:
        self.patience = Patience(sleep=self.sleep)
        self.first, self.second = Host(self, 0), Host(self, 1)

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s


@pytest.fixture
def world() -> World:
    return World()


def test_a_start_that_sees_nothing_of_the_log_goes_on_from_its_newest_commit(world: World) -> None:
    claim = world.first.log.begin()
    newest = [save_small(world.first.log, world.first, claim, step) for step in (10, 20)][-1]
    assert world.second.list(".stepkeeper/log/00000002") == []
    later = world.second.log.begin()
    assert later.slot == 3
    assert world.second.log.state.latest == newest
    assert len(read_manifests(world.second, newest, patience=world.patience)) == 1


def test_a_stale_writer_that_doesn_t_see_the_later_begin_commits_nothing(world: World) -> None:
    claim = world.first.log.begin()
    world.sleep(LATE_S)
    world.second.log.begin()
    assert world.first.log.refresh().claim == claim.slot, "it sees nothing of it"
    with pytest.raises(FencedError):
        save_small(world.first.log, world.first, claim, 10)
    assert world.now_s >= 2 * LATE_S
    assert world.first.log.state.commits == {}
    assert world.first.log.refresh() == world.second.log.refresh()


def test_a_save_waits_for_what_the_other_host_has_written_and_is_verified_once_all_is_shown(
    world: World,
) -> None:
    ours, theirs = (
        write_checkpoint(
            host, *small_order(10, 0, "ab" * 16, rank=rank, world_size=2), patience=world.patience
        )
        for rank, host in enumerate((world.first, world.second))
    )
    finished = finish_checkpoint(world.first, ours, [theirs.make_ref()], patience=world.patience)
    assert LATE_S <= world.now_s < 2 * LATE_S
    verify_objects(world.first, finished, patience=world.patience)
    begun_s = world.now_s
    verify_objects(Host(world, 2), finished, patience=world.patience)
    assert begun_s < world.now_s < begun_s + LATE_S + 10
