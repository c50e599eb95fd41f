"""A root with checkpoints of another writer: what a begin goes on from, and what the commits after it say."""

from collections.abc import Callable

import pytest

from stepkeeper.errors import FencedError, LogFormatError, RestoreError
from stepkeeper.log import BeginEntry, CommitEntry, ForeignBase, Log, ManifestRef
from stepkeeper.log.foreign_steps import find_steps_below, find_steps_in
from stepkeeper.storage import ObjectStat
from stepkeeper.storage.memory import MemoryBucket, MemoryStore

CommitStep = Callable[..., int]
REF = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)
BASE = ForeignBase(step=300, folder="step-300", reason="step 400 has no .metadata")


def offer() -> ForeignBase:
    return BASE


def never() -> ForeignBase:
    raise AssertionError("there is something to go on from")


def test_the_first_commit_has_no_parent_and_says_what_it_goes_on_from(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    claim = log.begin(offer=offer)
    assert (log.state.head, log.state.legacy) == (None, BASE)
    first, second = commit(log, claim, 301), commit(log, claim, 302)
    opened = Log(MemoryStore(bucket)).open()
    assert opened == log.state
    assert (opened.head, opened.legacy) == (second, None)
    assert [(each.slot, each.parent, each.legacy) for each in opened.line] == [
        (second, first, None),
        (first, None, BASE),
    ]
    body = log.entry(first).body
    assert isinstance(body, CommitEntry)
    assert (body.parent, body.legacy) == (None, BASE)


def test_a_start_before_the_first_commit_chooses_again_and_one_after_it_does_not(
    log: Log, commit: CommitStep
) -> None:
    log.begin(offer=offer)
    newer = ForeignBase(step=400, folder="step-400")
    claim = log.begin(offer=lambda: newer)
    assert log.state.legacy == newer
    # What a begin says holds, also when the other writer's steps are gone.
    claim = log.begin()
    assert log.state.legacy == newer
    head = commit(log, claim, 401)
    log.begin(offer=never)
    assert log.state.head == head


def test_when_the_first_commit_is_condemned_what_lies_below_it_is_the_latest_again(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    claim = log.begin(offer=offer)
    first, second = commit(log, claim, 301), commit(log, claim, 302)
    assert log.quarantine(claim, first, "bad") is not None
    assert log.state.commits[second].parent is None
    assert log.state.commits[second].legacy == BASE
    assert log.quarantine(claim, second, "bad") is None
    assert (log.state.head, log.state.legacy) == (None, BASE)
    assert log.latest(claim) is None
    later = Log(MemoryStore(bucket))
    later.begin(offer=never)
    assert (later.state.head, later.state.legacy) == (None, BASE)


def test_deleted_commits_leave_what_lies_below(log: Log, commit: CommitStep) -> None:
    claim = log.begin(offer=offer)
    first, second = commit(log, claim, 301), commit(log, claim, 302)
    log.delete(claim, lambda _: (first,))
    assert log.state.commits[second].legacy == BASE
    log.delete(claim, lambda _: (second,))
    assert (log.state.head, log.state.legacy, dict(log.state.commits)) == (None, BASE, {})


def test_a_process_that_restored_an_older_step_goes_on_from_it(log: Log, commit: CommitStep) -> None:
    claim = log.begin(offer=offer)
    abandoned = commit(log, claim, 301)
    older = ForeignBase(step=100, folder="100")
    claim = log.begin(base=older)
    assert (log.state.head, log.state.legacy) == (None, older)
    commit(log, claim, 101)
    assert [record.step for record in log.state.line] == [101]
    assert abandoned in log.state.commits


def test_from_scratch_is_said_and_holds_until_there_is_a_commit(log: Log, commit: CommitStep) -> None:
    log.begin(offer=offer)
    log.begin(scratch=True, offer=never)
    assert log.state.legacy is None
    claim = log.begin(offer=never)
    body = log.entry(claim.slot).body
    assert isinstance(body, BeginEntry)
    assert body.scratch
    commit(log, claim, 1)
    begun = log.entry(log.begin(offer=never).slot).body
    assert isinstance(begun, BeginEntry)
    assert begun.scratch is None


def test_a_claim_is_followed_by_another_only_while_it_holds(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    claim = log.begin(offer=offer)
    older = ForeignBase(step=100, folder="100", reason="step 300 was read bad")
    again = log.begin(base=older, after=claim)
    assert log.state.legacy == older
    with pytest.raises(FencedError, match="claim 0 is stale"):
        commit(log, claim, 301)
    Log(MemoryStore(bucket)).begin()
    with pytest.raises(FencedError, match="claim 1 is stale"):
        log.begin(base=ForeignBase(step=50, folder="50"), after=again)


@pytest.mark.parametrize(
    "forged",
    [
        lambda slot: CommitEntry(step=2, folder="2/0-a", size_bytes=1, manifest=REF, parent=None),
        lambda slot: CommitEntry(
            step=2, folder="2/0-a", size_bytes=1, manifest=REF, parent=slot, legacy=BASE
        ),
    ],
    ids=["none below", "both"],
)
def test_a_commit_that_says_another_base_than_the_log_is_refused(
    log: Log, bucket: MemoryBucket, forged: Callable[[int], CommitEntry], commit: CommitStep
) -> None:
    claim = log.begin(offer=offer)
    slot = log.state.tail + 1
    commit(log, claim, 301)
    path = f".stepkeeper/log/{slot:08d}.json"
    entry = log.entry(slot)
    object.__setattr__(entry, "body", forged(0))
    bucket.objects[path] = entry.to_json()
    with pytest.raises(LogFormatError):
        Log(MemoryStore(bucket)).open()


def test_nothing_is_begun_on_condemned_commits_alone_without_a_step_below(
    log: Log, commit: CommitStep
) -> None:
    claim = log.begin()
    log.quarantine(claim, commit(log, claim, 1), "bad")
    with pytest.raises(RestoreError, match="no latest one"):
        log.begin(offer=offer)


def stats(*paths: str) -> list[ObjectStat]:
    return [ObjectStat(path=path, size_bytes=1) for path in paths]


def test_steps_are_found_by_the_names_that_writers_give_them() -> None:
    nonce = "a" * 32
    found = find_steps_in(
        stats(
            "100/.metadata",
            f"100/7-{nonce}/.metadata",
            f"150/7-{nonce}/.metadata",
            f"150/7-{nonce}/__0_0.distcp",
            "step-200/.metadata",
            "step_250/.metadata",
            "step260/.metadata",
            "checkpoint-300/.metadata",
            "checkpoint_350/__0_0.distcp",
            "global_step400/.metadata",
            "iter_0000450/.metadata",
            "500/.manager_metadata",
            "500/.metadata",
            "notes-600/.metadata",
            "700/notes.txt",
            "step-800/sub/__0_0.distcp",
            "900",
            ".stepkeeper/log/00000000.json",
        )
    )
    assert [(each.step, each.folder, each.is_finished) for each in found] == [
        (500, "500", True),
        (450, "iter_0000450", True),
        (400, "global_step400", True),
        (350, "checkpoint_350", False),
        (300, "checkpoint-300", True),
        (260, "step260", True),
        (250, "step_250", True),
        (200, "step-200", True),
        (100, "100", True),
    ]
    assert found[0].writer == "torch_xla"


def test_what_lies_below_a_line_is_what_it_went_on_from_and_all_that_is_older(
    log: Log, commit: CommitStep
) -> None:
    found = find_steps_in(stats(*(f"step-{step}/.metadata" for step in (100, 200, 300, 400))))
    assert len(find_steps_below(log.open(), lambda: found)) == 4
    claim = log.begin(offer=offer)
    assert len(find_steps_below(log.state, lambda: found)) == 4, "nothing is committed yet"
    commit(log, claim, 301)
    assert [each.step for each in find_steps_below(log.state, lambda: found)] == [300, 200, 100]
    commit(log, log.begin(scratch=True), 1)

    def nothing_to_find() -> tuple[()]:
        raise AssertionError("there can't be any")

    assert find_steps_below(log.state, nothing_to_find) == ()
