"""Another writer's steps, and bytes that are read bad: what is restored, read again, or not read here."""

import logging
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper import CheckpointManager
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
    TransientStorageError,
)
from stepkeeper.log import ForeignBase
from stepkeeper.restore.foreign.choosing import choose_foreign_step
from stepkeeper.restore.restorer import Restorer
from stepkeeper.restore.second_read import Host, Question, Reading, confirm_bad, find_question, this_host
from stepkeeper.restore.verify import verify_step
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.retry import Patience
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.damage import contents
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import MemoryBucket, MemoryStore, named_bucket


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A root with steps 100 and 200 of stock DCP."""
    root = tmp_path_factory.mktemp("legacy")
    for folder, step in (("step-100", 100), ("step-200", 200)):
        model = {"w": torch.full((6, 4), float(step)), "b": torch.arange(5)}
        save({"model": model, "step": step}, checkpoint_id=root / folder, no_dist=True)
    return contents(root)


@pytest.fixture
def bucket(objects: dict[str, bytes]) -> MemoryBucket:
    bucket = MemoryBucket()
    bucket.objects.update(objects)
    return bucket


def chosen(bucket: MemoryBucket) -> ForeignBase | None:
    return choose_foreign_step(MemoryStore(bucket), lambda: MemoryStore(bucket))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (".metadata", None, "has no .metadata"),
        (".metadata", slice(-30), "the metadata of a checkpoint"),
        ("__0_0.distcp", None, "__0_0.distcp is missing"),
        ("__0_0.distcp", slice(-1), "__0_0.distcp is cut short"),
    ],
)
def test_what_is_incomplete_is_passed_over_and_said(
    bucket: MemoryBucket, caplog: pytest.LogCaptureFixture, name: str, data: slice | None, said: str
) -> None:
    whole = bucket.objects.pop(f"step-200/{name}")
    if data is not None:
        bucket.objects[f"step-200/{name}"] = whole[data]
    found = chosen(bucket)
    assert found is not None
    assert (found.step, found.folder) == (100, "step-100")
    assert said in (found.reason or "")
    (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert said in record.getMessage()


def test_where_none_is_complete_nothing_is_begun(bucket: MemoryBucket) -> None:
    for step in (100, 200):
        del bucket.objects[f"step-{step}/.metadata"]
    with pytest.raises(RestoreError, match=r"none of them is complete: step 200 .*; step 100 .*another root"):
        chosen(bucket)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (".metadata", "the root itself"),
        ("final/.metadata", "final"),
        ("run1/step_100/.metadata", "run1/step_100"),
        (f"run1/100/3-{'0' * 32}/.metadata", f"run1/100/3-{'0' * 32}"),
    ],
)
def test_a_checkpoint_without_a_step_in_its_name_is_not_taken_for_nothing(path: str, said: str) -> None:
    bucket = MemoryBucket()
    bucket.objects[path] = b"?"
    with pytest.raises(RestoreError, match=rf"aren't steps of it: {said}\. Use the folder"):
        chosen(bucket)


def test_no_answer_is_no_incomplete_step(bucket: MemoryBucket) -> None:
    store = MemoryStore(bucket, hook=at("before read", TransientStorageError("no answer")))
    with pytest.raises(TransientStorageError):
        choose_foreign_step(store, lambda: store, patience=Patience(total_s=0))


class Scaled(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is pickled by a name under which it is found."""
    monkeypatch.setattr(Scaled, "__module__", "torch")
    monkeypatch.setattr(torch, "Scaled", Scaled, raising=False)


def restored(root: Path, exclude: Sequence[str] = ()) -> torch.Tensor:
    state = {"w": torch.zeros(4, 4), "b": torch.zeros(100)}
    with CheckpointManager(root) as manager:
        manager.restore(state, exclude=exclude)
    return state["b"]


def save_two(root: Path, tensor: torch.Tensor) -> None:
    for step, w in (("100", torch.zeros(4, 4)), ("200", tensor)):
        save({"w": w, "b": torch.ones(100)}, checkpoint_id=root / step, no_dist=True)


def test_a_tensor_that_is_not_read_is_named_and_the_step_is_not_passed_over(tmp_path: Path) -> None:
    save_two(tmp_path, torch.eye(4).as_subclass(Scaled))
    with pytest.raises(
        RestoreError, match=r"/200: w can't be read by stepkeeper: it names torch.Scaled"
    ) as raised:
        restored(tmp_path)
    assert "exclude=['w']" in str(raised.value)
    assert "dcp.load" in str(raised.value)
    assert torch.equal(restored(tmp_path, exclude=["w"]), torch.ones(100))


def test_metadata_that_names_what_is_not_read_is_no_reason_to_go_back(tmp_path: Path) -> None:
    save_two(tmp_path, torch.zeros(4, 4))
    file = tmp_path / "200/.metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = {"rules": LoadRules()}
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        RestoreError, match=r"200/.metadata can't be read by stepkeeper: it names .*LoadRules"
    ):
        restored(tmp_path)


BAD = BadBytes(path="2/0-a/__0_0.distcp", length_bytes=3, crc32c=7, offset_bytes=0, block=0)


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
        ([on("a", BAD), on("b", replace(BAD, path="2/0-a/__1_0.distcp"))], 0, 1, "node-b"),
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
    root = SmallRoot(words="begin")
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
