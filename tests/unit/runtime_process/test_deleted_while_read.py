"""A commit that is deleted while it is verified isn't called bad, and no bad one is ever called deleted."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

import pytest
import torch

from stepkeeper.checkpoint import SaveOrder, Structure, TensorOrder, finish_checkpoint, write_checkpoint
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import RestoreError, StorageError, TornCheckpointError
from stepkeeper.log import Claim, CommitRecord, Log
from stepkeeper.restore import Restorer, describe_step, verify_step
from stepkeeper.storage.memory import MemoryStore, Operation


class NoCompanion:
    """This process has claimed nothing."""

    claimed_root = None


NO_COMPANION = cast(Companion, NoCompanion())


@dataclass
class Root:
    """Two commits; with the first read of its data something happens to the older one."""

    happens: Callable[["Root"], None]
    store: MemoryStore = field(default_factory=MemoryStore)
    claim: Claim = field(init=False)
    commit: CommitRecord = field(init=False)
    when_read: str = ".distcp"
    refuses_log: bool = False
    has_happened: bool = False

    def __post_init__(self) -> None:
        self.claim = Log(self.store).begin()
        self.commit, _ = self._committed(1), self._committed(2)
        self.store.hook = self._meanwhile

    def _committed(self, step: int) -> CommitRecord:
        other, own = (write_checkpoint(self.store, *order(rank, step)) for rank in (1, 0))
        finished = finish_checkpoint(self.store, own, [other.make_ref()])
        log = Log(self.store)
        log.open()
        return log.commit(
            self.claim,
            step=step,
            folder=own.folder,
            size_bytes=finished.size_bytes,
            manifest=finished.manifest,
        )

    def _meanwhile(self, when: Literal["before", "after"], operation: Operation, path: str) -> None:
        if operation == "read" and path.endswith(self.when_read) and not self.has_happened:
            self.has_happened = True
            self.happens(self)
        if self.refuses_log and path.startswith(".stepkeeper/log") and when == "before":
            raise StorageError("no permission")

    def release(self) -> None:
        """Do what retention does first."""
        log = Log(self.store)
        log.open()
        log.delete(self.claim, lambda _: [self.commit.slot])

    def sweep(self, but: str = "") -> None:
        """Do what retention does then."""
        gone = [path for path in self.store.bucket.objects if path.startswith(f"{self.commit.folder}/")]
        for path in gone:
            if path != f"{self.commit.folder}/{but}":
                del self.store.bucket.objects[path]

    def flip(self, name: str) -> None:
        path = f"{self.commit.folder}/{name}"
        data = self.store.bucket.objects[path]
        self.store.bucket.objects[path] = bytes([data[0] ^ 1]) + data[1:]

    def verify(self) -> None:
        assert verify_step(self.restorer(), NO_COMPANION, 1).step == 1

    def restorer(self) -> Restorer:
        return Restorer(self.store, SoloRankGroup(), reopen=lambda: self.store)


def order(rank: int, step: int) -> tuple[SaveOrder, memoryview]:
    tensor = TensorOrder(
        fqn="w", dtype="float32", global_shape=(2, 8), offsets=(rank, 0), sizes=(1, 8), start=0
    )
    save = SaveOrder(
        rank=rank,
        world_size=2,
        step=step,
        claim=0,
        nonce=f"{step:032x}",
        structure=Structure.build([tensor]),
        values=(),
    )
    return save, memoryview(bytearray(32))


def deleted(root: Root) -> None:
    root.release()
    root.sweep()


def test_retention_that_comes_meanwhile_is_what_is_said() -> None:
    with pytest.raises(RestoreError, match=r"was deleted while it was read.*_0\.distcp is missing"):
        Root(deleted).verify()


def test_what_a_pin_holds_is_damaged_where_it_is_missing() -> None:
    """Retention let go of the commit, and had to leave its data: somebody else took them."""
    root = Root(deleted)
    with pytest.raises(TornCheckpointError, match="is missing"):
        root.restorer().restore(root.commit, {"w": torch.zeros(2, 8)}, is_pinned=lambda: True)


def test_what_a_commit_holds_is_damaged_or_deleted() -> None:
    with pytest.raises(RestoreError, match="was deleted just now"):
        describe_step(Root(deleted, when_read="manifest.0.json").store, 1)
    with pytest.raises(TornCheckpointError, match="is missing"):
        describe_step(Root(Root.sweep, when_read="manifest.0.json").store, 1)


def test_objects_that_go_missing_by_themselves_are_damage() -> None:
    with pytest.raises(TornCheckpointError, match="is missing"):
        Root(Root.sweep).verify()


@pytest.mark.parametrize("bad", ["__0_0.distcp", "__1_0.distcp"])
def test_bad_bytes_beside_deleted_objects_are_damage(bad: str) -> None:
    def happens(root: Root) -> None:
        root.flip(bad)
        root.release()
        root.sweep(but=bad)

    with pytest.raises(TornCheckpointError, match=f"{bad} is not what was written"):
        Root(happens).verify()


def test_without_the_logs_word_it_is_neither() -> None:
    def happens(root: Root) -> None:
        deleted(root)
        root.refuses_log = True

    with pytest.raises(StorageError, match="no permission"):
        Root(happens).verify()
