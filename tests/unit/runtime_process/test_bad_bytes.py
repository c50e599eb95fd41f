"""Bytes that are read bad: another node reads them again, and what was deleted meanwhile isn't called bad."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

import pytest

from stepkeeper.checkpoint import SaveOrder, Structure, TensorOrder, finish_checkpoint, write_checkpoint
from stepkeeper.checkpoint.reread import reread_bad_bytes
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import BadBytes, BadNodeError, RestoreError, StorageError, TornCheckpointError
from stepkeeper.log import Claim, CommitRecord, Log
from stepkeeper.restore import Restorer, verify_step
from stepkeeper.restore.second_read import Host, Question, Reading, confirm_bad, find_question, this_host
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.memory import MemoryBucket, MemoryStore, Operation

BAD = BadBytes(path="2/0-a/__0_0.distcp", length_bytes=3, crc32c=7, offset_bytes=0, block=0)


OTHER = BadBytes(path="2/0-a/__1_0.distcp", length_bytes=3, crc32c=7, offset_bytes=0, block=0)


def on(machine: str, bad: BadBytes | None = None) -> Reading:
    host = Host(name=f"node-{machine}", machine=machine)
    return Reading(host=host, reason=None if bad is None else f"{bad.path} is bad", bad_bytes=bad)


@pytest.mark.parametrize(
    ("readings", "first", "reader", "other"),
    [
        ([on("a"), on("a", BAD)], 1, 1, "node-a"),
        ([on("a", BAD)], 0, 0, "node-a"),
        ([on("a", BAD), on("a"), on("b"), on("c")], 0, 2, "node-b"),
        ([on("a"), on("a"), on("b", BAD)], 2, 0, "node-a"),
        # Two ranks of one node aren't two nodes; two nodes that read other bytes bad don't agree.
        ([on("a", BAD), on("a", BAD), on("b")], 0, 2, "node-b"),
        ([on("a", BAD), on("b", OTHER)], 0, 1, "node-b"),
        ([on("a", BAD), on("a", BAD), on("b"), on("c", BAD)], 0, None, "node-c"),
    ],
)
def test_another_node_reads_the_same_bytes_if_there_is_one(
    readings: list[Reading], first: int, reader: int | None, other: str
) -> None:
    question = find_question(readings)
    assert question is not None
    assert (question.first, question.reader, question.other.name) == (first, reader, other)
    assert question.reading.bad == BAD
    assert decode(Question, encode(question)) == question


def test_nothing_is_condemned_where_it_is_not_known_what_was_bad() -> None:
    assert find_question([on("a"), Reading(host=this_host(), reason="bad, somewhere")]) is None


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"0123456789", None),
        (b"01x3456789", "crc32c"),
        (b"012", "1 bytes are there, not 4"),
        (None, "it is missing"),
    ],
)
def test_a_block_is_right_or_wrong_by_its_own_bytes(data: bytes | None, wrong: str | None) -> None:
    store = MemoryStore()
    if data is not None:
        store.put_if_absent("1/0-a/x", data)
    bad = BadBytes(path="1/0-a/x", offset_bytes=2, length_bytes=4, crc32c=crc32c(b"2345"), block=0)
    found = reread_bad_bytes(store, bad)
    assert found is None if wrong is None else wrong in str(found)


@pytest.mark.parametrize("there", [b"0123", b"01x3"])
def test_one_node_alone_reads_again_over_fresh_connections(there: bytes) -> None:
    bucket = MemoryBucket()
    bucket.objects["1/0-a/x"] = there
    opened: list[MemoryStore] = []

    def reopen() -> MemoryStore:
        opened.append(MemoryStore(bucket))
        return opened[-1]

    bad = BadBytes(path="1/0-a/x", length_bytes=4, crc32c=crc32c(b"0123"), block=0)
    torn = TornCheckpointError("block 0 of 1/0-a/x is bad", bad)
    host = Host(name="node-7", machine="7")
    if there == b"0123":
        with pytest.raises(
            BadNodeError, match=r"node-7 \(rank 0\) reads bad bytes, and good ones .* 1/0-a/x is bad"
        ):
            confirm_bad("torn", SoloRankGroup(), host, torn, reopen)
    else:
        said = confirm_bad("torn", SoloRankGroup(), host, torn, reopen)
        assert "1/0-a/x is bad (read bad by node node-7, also over fresh connections" in said
        assert len(opened) == 2


def test_no_answer_to_the_second_reading_condemns_nothing() -> None:
    def reopen() -> MemoryStore:
        raise StorageError("no permission")

    bad = BadBytes(path="1/0-a/x", length_bytes=4, crc32c=0, block=0)
    with pytest.raises(StorageError, match="no permission"):
        confirm_bad("torn", SoloRankGroup(), this_host(), TornCheckpointError("bad", bad), reopen)


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
