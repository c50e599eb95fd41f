"""A claim that restored nothing, and repeats steps: it begins a branch, and what was saved before stays."""

import json
from collections.abc import Callable

import pytest

from stepkeeper.errors import FencedError, LogFormatError
from stepkeeper.log import BeginEntry, Claim, CommitRecord, ForeignBase, Log, LogState
from stepkeeper.log.claims import must_branch
from stepkeeper.log.entries import Entry
from stepkeeper.log.records import ManifestRef
from stepkeeper.log.replay import entry_for
from stepkeeper.policy.keep import BestN, LastN
from stepkeeper.retention.deletable import choose_deletable
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.memory import MemoryBucket, MemoryStore

CommitStep = Callable[..., int]
ALL_VERIFIED = range(100)


def branch(log: Log) -> Claim:
    """Claim the root as a process that has restored nothing does before it repeats a step."""
    return log.begin(branch=True, after=log.begin(host="a-new-one"), host="a-new-one")


def opened(bucket: MemoryBucket) -> LogState:
    return Log(MemoryStore(bucket)).open()


def parent_of(log: Log, slot: int) -> int | None:
    return log.state.commits[slot].parent


@pytest.mark.parametrize(
    ("head", "step", "branches"), [(None, 0, False), (20, 21, False), (20, 20, True), (20, 1, True)]
)
def test_only_steps_greater_than_heads_go_on_from_it(head: int | None, step: int, branches: bool) -> None:
    ref = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)
    for found in (
        None
        if head is None
        else CommitRecord(slot=1, claim=0, step=head, folder="1/0-a", size_bytes=1, manifest=ref),
        None if head is None else ForeignBase(step=head, folder=str(head)),
    ):
        assert must_branch(found, step) is branches


def test_head_stays_until_the_branch_has_a_commit(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    first = log.begin()
    old = [commit(log, first, step) for step in (10, 20)]
    claim = branch(log)
    body = log.entry(claim.slot).body
    assert isinstance(body, BeginEntry)
    assert (body.base, body.branch) == (None, True)
    assert [record.slot for record in opened(bucket).line] == [*reversed(old)]
    new = commit(log, claim, 1)
    state = opened(bucket)
    assert [record.slot for record in state.line] == [new]
    assert not state.branching
    assert {record.slot for record in state.live} == {*old, new}
    assert parent_of(log, commit(log, claim, 2)) == new


def test_a_branch_without_a_commit_leaves_nothing_behind(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    """Its process ended in its first save: the next start goes on from what was there."""
    head = commit(log, log.begin(), 20)
    branch(log)
    later = Log(MemoryStore(bucket))
    claim = later.begin()
    assert later.latest(claim) == later.state.commits[head]
    assert parent_of(later, commit(later, claim, 21)) == head


def test_nothing_is_deleted_before_the_branch_has_a_commit(log: Log, commit: CommitStep) -> None:
    first = log.begin()
    old = [commit(log, first, step) for step in (10, 20, 30)]
    assert choose_deletable(log.state, LastN(1), ALL_VERIFIED) == tuple(old[:2])
    branch(log)
    assert choose_deletable(log.state, LastN(1), ALL_VERIFIED) == ()


@pytest.mark.parametrize("policy", [LastN(1), LastN(2), BestN(1, "loss", "min")])
def test_what_was_there_goes_only_once_the_branch_has_passed_it(
    log: Log, commit: CommitStep, policy: LastN | BestN
) -> None:
    first = log.begin()
    old = [commit(log, first, step) for step in (10, 20)]
    claim = branch(log)
    for step in (1, 2, 3, 9):
        commit(log, claim, step)
        assert not set(choose_deletable(log.state, policy, ALL_VERIFIED)) & set(old)
    commit(log, claim, 10)
    assert set(choose_deletable(log.state, policy, ALL_VERIFIED)) & set(old) == {old[0]}
    commit(log, claim, 25)
    assert set(choose_deletable(log.state, policy, ALL_VERIFIED)) >= set(old)


def test_another_writers_step_is_left_and_nothing_lies_below_the_branch(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    theirs = ForeignBase(step=900, folder="900")
    log.begin(offer=lambda: theirs)
    claim = branch(log)
    assert opened(bucket).legacy == theirs
    commit(log, claim, 5)
    state = opened(bucket)
    assert state.latest is not None
    assert (state.latest.parent, state.latest.legacy, state.legacy) == (None, None, None)


def test_what_is_condemned_under_such_a_claim_moves_head_to_its_parent(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    first = log.begin()
    older, old = (commit(log, first, step) for step in (10, 20))
    claim = branch(log)
    log.quarantine(claim, old, "bad")
    assert opened(bucket).head == older
    # It was restored: the claim that follows goes on from there, though HEAD is that already.
    back = log.begin(base=older, after=claim)
    assert back != claim
    assert parent_of(log, commit(log, back, 11)) == older


def test_a_branch_is_begun_under_a_claim_that_holds_only(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    claim = log.begin()
    commit(log, claim, 20)
    Log(MemoryStore(bucket)).begin()
    with pytest.raises(FencedError, match="claim 0 is stale"):
        log.begin(branch=True, after=claim)


def test_the_log_opens_from_an_index_between_the_begin_and_the_commit(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    commit(log, log.begin(), 20)
    claim = branch(log)
    for save in range(40):
        log.void(claim, "the store is full", f"1/{claim.slot}-{save:032x}")
    state = opened(bucket)
    assert state == log.state
    assert state.branching
    assert state.index > claim.slot
    assert state.host == "a-new-one"
    assert parent_of(log, commit(log, claim, 1)) is None


def test_entries_that_contradict_a_branch_are_refused(log: Log, commit: CommitStep) -> None:
    head = commit(log, log.begin(), 20)
    for body in (BeginEntry(base=head, branch=True), BeginEntry(scratch=True, branch=True)):
        with pytest.raises(LogFormatError, match="begins a branch, and goes on from something too"):
            entry_for(log.state, body, claim=None, nonce="ab" * 16)


def test_a_reader_that_does_not_know_branches_refuses_the_log(log: Log, commit: CommitStep) -> None:
    """It would take HEAD for nothing: the word is left out where there is no branch, and an error where there is."""
    commit(log, log.begin(), 20)
    plain, branched = log.entry(0).to_json(), log.entry(branch(log).slot).to_json()
    assert "branch" not in json.loads(plain)["begin"]
    assert json.loads(branched)["begin"]["branch"] is True
    unknown = branched.replace(b'"branch":true', b'"brunch":true').rpartition(b',"crc32c"')[0]
    with pytest.raises(LogFormatError, match="brunch"):
        Entry.from_json(b'%b,"crc32c":%d}' % (unknown, crc32c(unknown)), "slot 3")
