"""Bytes that are read bad: another node reads them again, and what was deleted meanwhile isn't called bad."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Literal, cast

import pytest

from stepkeeper.checkpoint.reread import reread_bad_bytes
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import BadBytes, BadNodeError, RestoreError, StorageError, TornCheckpointError
from stepkeeper.log import Log
from stepkeeper.restore.restorer import Restorer
from stepkeeper.restore.second_read import Host, Question, Reading, confirm_bad, find_question, this_host
from stepkeeper.restore.verify import verify_step
from stepkeeper.storage.crc import crc32c
from stepkeeper_testing.checkpoints import save_small
from stepkeeper_testing.memory import MemoryBucket, MemoryStore, Operation

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


class Root:
    """Two commits; with the first read of its data something happens to the older one."""

    def __init__(self, happens: Sequence[Callable[["Root"], None]]) -> None:
        self.store, self.happens, self.refuses_log = MemoryStore(), list(happens), False
        log = Log(self.store)
        self.claim = log.begin()
        self.commit, _ = (save_small(log, self.store, self.claim, step, world_size=2) for step in (1, 2))
        self.store.hook = self._meanwhile

    def _meanwhile(self, when: Literal["before", "after"], operation: Operation, path: str) -> None:
        while operation == "read" and path.endswith(".distcp") and self.happens:
            self.happens.pop(0)(self)
        if self.refuses_log and path.startswith(".stepkeeper/log") and when == "before":
            raise StorageError("no permission")


def release(root: Root) -> None:
    """Do what retention does first."""
    log = Log(root.store)
    log.open()
    log.delete(root.claim, lambda _: [root.commit.slot])


def sweep(root: Root) -> None:
    """Do what retention does then."""
    for path in [*root.store.bucket.objects]:
        if path.startswith(f"{root.commit.folder}/"):
            del root.store.bucket.objects[path]


def flip(root: Root, name: str) -> None:
    path = f"{root.commit.folder}/{name}"
    data = root.store.bucket.objects[path]
    root.store.bucket.objects[path] = bytes([data[0] ^ 1]) + data[1:]


def refuse_log(root: Root) -> None:
    root.refuses_log = True


@pytest.mark.parametrize(
    ("happens", "error", "said"),
    [
        pytest.param(
            [release, sweep],
            RestoreError,
            r"was deleted while it was read.*_0\.distcp is missing",
            id="retention comes",
        ),
        pytest.param([sweep], TornCheckpointError, "is missing", id="objects go missing by themselves"),
        pytest.param([release, sweep, refuse_log], StorageError, "no permission", id="the log can't be read"),
    ],
)
def test_what_is_deleted_while_it_is_read_is_not_called_bad(
    happens: list[Callable[[Root], None]], error: type[Exception], said: str
) -> None:
    root = Root(happens)
    restorer = Restorer(root.store, SoloRankGroup(), reopen=lambda: root.store)
    with pytest.raises(error, match=said):
        verify_step(restorer, cast(Companion, SimpleNamespace(claimed_root=None)), 1)
