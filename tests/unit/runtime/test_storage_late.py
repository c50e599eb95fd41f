"""A file system that shows a host what others wrote a minute late, as NFS may: nothing is lost, nobody is fooled."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

import pytest
from store_parts.behind import Behind
from typing_extensions import override

from stepkeeper.checkpoint import (
    FinishedCheckpoint,
    SaveOrder,
    Structure,
    TensorOrder,
    finish_checkpoint,
    read_manifests,
    verify_objects,
    write_checkpoint,
)
from stepkeeper.errors import FencedError, MissingObjectError, TornCheckpointError, VerifyError
from stepkeeper.log import Claim, CommitRecord, Log, ManifestRef
from stepkeeper.retention.garbage import gc
from stepkeeper.storage.base import Buffer, ObjectStat
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import Patience

LATE_S: Final = 60.0
NONCE: Final = "ab" * 16


@dataclass
class World:
    """One server, several hosts, and a time that goes on only where somebody waits."""

    bucket: MemoryBucket = field(default_factory=MemoryBucket)
    now_s: float = 0.0
    written: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By whom, and when."""

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s

    @property
    def patience(self) -> Patience:
        return Patience(sleep=self.sleep)


@final
class Host(Behind):
    """A put is decided by the server at once; what another host has put is shown here after a while."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(MemoryStore(world.bucket))
        self._world, self._number = world, number

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


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def hosts(world: World) -> tuple[Host, Host]:
    return Host(world, 0), Host(world, 1)


@pytest.fixture
def logs(world: World, hosts: tuple[Host, Host]) -> tuple[Log, Log]:
    return Log(hosts[0], patience=world.patience), Log(hosts[1], patience=world.patience)


def order(rank: int, step: int, claim: Claim) -> SaveOrder:
    row = TensorOrder(
        fqn="w", dtype="float32", global_shape=(2, 100), offsets=(rank, 0), sizes=(1, 100), start=0
    )
    return SaveOrder(
        rank=rank,
        world_size=2,
        step=step,
        claim=claim.slot,
        nonce=NONCE,
        structure=Structure.build([row]),
        values=(),
    )


def finish(
    world: World, hosts: tuple[Host, Host], step: int, claim: Claim
) -> tuple[FinishedCheckpoint, SaveOrder]:
    data = memoryview(bytes(400))
    other = write_checkpoint(hosts[1], order(1, step, claim), data, patience=world.patience)
    own = write_checkpoint(hosts[0], order(0, step, claim), data, patience=world.patience)
    return finish_checkpoint(hosts[0], own, [other.make_ref()], patience=world.patience), order(
        0, step, claim
    )


def save(world: World, hosts: tuple[Host, Host], log: Log, step: int, claim: Claim) -> CommitRecord:
    finished, saved = finish(world, hosts, step, claim)
    return log.commit(
        claim, step=step, folder=saved.folder, size_bytes=finished.size_bytes, manifest=finished.manifest
    )


def test_a_start_that_sees_nothing_of_the_log_goes_on_from_its_newest_commit(
    world: World, hosts: tuple[Host, Host], logs: tuple[Log, Log]
) -> None:
    claim = logs[0].begin()
    save(world, hosts, logs[0], 10, claim)
    newest = save(world, hosts, logs[0], 20, claim)
    assert hosts[1].list(".stepkeeper/log/00000002") == []
    later = logs[1].begin()
    assert later.slot == 3
    assert logs[1].state.latest == newest
    assert len(read_manifests(hosts[1], newest, patience=world.patience)) == 2


def test_a_stale_writer_that_doesn_t_see_the_later_begin_commits_nothing(
    world: World, hosts: tuple[Host, Host], logs: tuple[Log, Log]
) -> None:
    claim = logs[0].begin()
    finished, saved = finish(world, hosts, 10, claim)
    world.sleep(LATE_S)
    logs[1].begin()
    assert logs[0].refresh().claim == claim.slot, "it sees nothing of it"
    with pytest.raises(FencedError):
        logs[0].commit(
            claim, step=10, folder=saved.folder, size_bytes=finished.size_bytes, manifest=finished.manifest
        )
    assert world.now_s >= 2 * LATE_S
    assert logs[0].state.commits == {}


def test_two_starts_at_once_make_one_log(logs: tuple[Log, Log], world: World) -> None:
    first, second = logs[0].begin(), logs[1].begin()
    assert (first.slot, second.slot) == (0, 1)
    with pytest.raises(FencedError):
        logs[0].void(first, "nothing to save", "10/0-x")
    assert logs[0].refresh() == logs[1].refresh()


def test_a_save_waits_for_what_the_other_host_has_written(
    world: World, hosts: tuple[Host, Host], logs: tuple[Log, Log]
) -> None:
    finished, _ = finish(world, hosts, 10, logs[0].begin())
    assert LATE_S <= world.now_s < 2 * LATE_S
    verify_objects(hosts[0], finished, patience=world.patience)


def test_a_save_is_verified_once_all_is_shown(
    world: World, hosts: tuple[Host, Host], logs: tuple[Log, Log]
) -> None:
    finished, _ = finish(world, hosts, 10, logs[0].begin())
    begun_s = world.now_s
    verify_objects(Host(world, 2), finished, patience=world.patience)
    assert begun_s < world.now_s < begun_s + LATE_S + 10


def test_what_never_shows_is_missing(world: World, hosts: tuple[Host, Host], logs: tuple[Log, Log]) -> None:
    finished, saved = finish(world, hosts, 10, logs[0].begin())
    hosts[0].delete(f"{saved.folder}/manifest.1.json")
    with pytest.raises(VerifyError, match=r"manifest\.1\.json is missing"):
        verify_objects(hosts[0], finished, patience=world.patience)
    own = write_checkpoint(hosts[0], saved, memoryview(bytes(400)), patience=world.patience)
    (other,) = (each for each in finished.objects if each.path == "manifest.1.json")
    gone = ManifestRef(path=other.path, size_bytes=other.size_bytes, crc32c=other.crc32c)
    with pytest.raises(TornCheckpointError, match=r"manifest\.1\.json"):
        finish_checkpoint(hosts[0], own, [gone], patience=world.patience)


def test_a_reader_behind_holds_what_it_has_pinned(
    world: World, hosts: tuple[Host, Host], logs: tuple[Log, Log]
) -> None:
    claim = logs[0].begin()
    first = save(world, hosts, logs[0], 10, claim)
    world.sleep(LATE_S)
    save(world, hosts, logs[0], 20, claim)
    assert logs[1].open().latest == first, "it is behind"
    assert gc(logs[1], hosts[1], patience=world.patience).collected == ()
    assert len(read_manifests(hosts[1], first, patience=world.patience)) == 2
