"""Bytes that are read bad: another node reads them again, and what was deleted meanwhile isn't called bad."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from stepkeeper.checkpoint.reread import reread_bad_bytes
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import (
    BadBytes,
    BadNodeError,
    PartlyRestoredError,
    RestoreError,
    StorageError,
    TornCheckpointError,
)
from stepkeeper.restore.restorer import Restorer
from stepkeeper.restore.second_read import Host, Question, Reading, confirm_bad, find_question, this_host
from stepkeeper.restore.verify import verify_step
from stepkeeper.storage.crc import crc32c
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import MemoryBucket, MemoryStore, named_bucket

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
        (b"012", "it has 1 bytes, not 4"),
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


@pytest.mark.parametrize("verifies", [True, False])
@pytest.mark.parametrize(
    ("is_deleted", "log_answers", "error", "said"),
    [
        pytest.param(True, True, RestoreError, r"deleted while it was read.* is missing", id="retention"),
        pytest.param(False, True, TornCheckpointError, "is missing", id="objects go missing by themselves"),
        pytest.param(True, False, StorageError, "no permission", id="the log can't be read"),
    ],
)
def test_what_is_deleted_while_it_is_read_is_not_called_bad(
    *, verifies: bool, is_deleted: bool, log_answers: bool, error: type[Exception], said: str
) -> None:
    root = SmallRoot()
    root.play("begin")
    commit = root.save(1, world_size=2)
    root.play("2x2")
    store = MemoryStore(named_bucket(root.url.removeprefix("memory://")))

    def delete() -> None:
        if is_deleted:
            root.play("-1")
        for path in [*store.bucket.objects]:
            if path.startswith("1/"):
                del store.bucket.objects[path]
        refused = StorageError("no permission")
        store.hook = None if log_answers else at("before read", refused, path=".stepkeeper/log")

    # Two threads read: once.
    store.hook = at("before read", delete, path=".distcp", times=1)
    restorer = Restorer(store, SoloRankGroup(), reopen=lambda: store)
    if verifies:
        with pytest.raises(error, match=said):
            verify_step(restorer, cast(Companion, SimpleNamespace(claimed_root=None)), 1)
        return
    with pytest.raises(PartlyRestoredError, match=said) as raised:
        restorer.restore(commit, {"model": {"w": torch.zeros(2, 8)}}, rules=LoadRules(items=["model"]))
    assert isinstance(raised.value.__cause__, error)
