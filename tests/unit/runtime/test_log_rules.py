"""Test which process may append to the log, puts without an answer, and entries that are refused."""

from collections.abc import Callable
from functools import reduce

import pytest

from stepkeeper.contract import Identity
from stepkeeper.errors import (
    FencedError,
    LogFormatError,
    OtherJobsRootError,
    StorageError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.log import Claim, CommitRecord, Log
from stepkeeper.log.claims import must_branch
from stepkeeper.log.entries import BeginEntry, Body, CommitEntry, DeleteEntry, QuarantineEntry, RestoredEntry
from stepkeeper.log.records import ForeignBase, ManifestRef
from stepkeeper.log.state import LogState, apply_body
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import FaultHook, MemoryBucket, MemoryStore
from stepkeeper_testing.pod import pod_identity

CommitStep = Callable[..., int]
NO_PATIENCE = Patience(total_s=0, sleep=lambda _: None)
IMPATIENT = Patience(total_s=0.2, sleep=lambda _: None)
NONCE = "ab" * 16


def identity(job: str = "llm", uid: str = "u1", ordinal: tuple[int, int] = (0, 0)) -> Identity:
    jobset_number, restart_attempt = ordinal
    return pod_identity(
        namespace="team", job=job, job_uid=uid, jobset_number=jobset_number, restart_attempt=restart_attempt
    )


def failing(times: int, *, applied: bool, error: Exception | None = None) -> FaultHook:
    """Return a hook: the first `times` puts get no answer, or an error."""
    when = "after" if applied else "before"
    return at(f"{when} put_if_absent", error or TransientStorageError("no answer"), times=times)


def unanswered_once(bucket: MemoryBucket, claim: Claim, *, applied: bool) -> Log:
    """A log of the claim whose next put gets no answer."""
    log = Log(MemoryStore(bucket, hook=failing(1, applied=applied)), patience=NO_PATIENCE)
    log.resume(claim)
    return log


def test_a_later_begin_fences_the_earlier_claim(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    claim = log.begin()
    assert log.latest(claim) is None
    assert commit(log, claim, 10) == 1
    latest = log.latest(claim)
    assert latest is not None
    assert latest.slot == 1
    other = Log(MemoryStore(bucket))
    later = other.begin()
    for act in (
        lambda: commit(log, claim, 20),
        lambda: log.delete(claim, lambda state: [1]),
        lambda: log.quarantine(claim, 1, "bad"),
        lambda: log.mark_restored(claim, 1),
        lambda: log.void(claim, "late", "10/0-x"),
        lambda: log.latest(claim),
        lambda: Log(MemoryStore(bucket)).resume(claim),
    ):
        with pytest.raises(
            FencedError, match=f"claim {claim.slot} is stale: slot {later.slot} .*; stop one of the two"
        ):
            act()
    assert other.refresh().tail == later.slot


@pytest.mark.parametrize(
    ("uid", "ordinal", "is_fenced"),
    [("u1", (1, 2), True), ("u1", (0, 9), True), ("u1", (1, 3), False), ("u2", (0, 0), False)],
)
def test_an_older_start_of_the_same_job_is_fenced(
    log: Log, uid: str, ordinal: tuple[int, int], is_fenced: bool
) -> None:
    log.begin(identity(ordinal=(1, 3)), host="node-a")
    if is_fenced:
        with pytest.raises(FencedError, match=r"start \[1, 3\] of team/llm on host node-a has claimed"):
            log.begin(identity(uid=uid, ordinal=ordinal))
    else:
        log.begin(identity(uid=uid, ordinal=ordinal))
        with pytest.raises(FencedError, match=r"\[1, 3\]"):
            log.begin(identity(ordinal=(1, 0)))


@pytest.mark.parametrize("take_over", [True, "team/llm"])
def test_another_jobs_root_needs_a_take_over(log: Log, take_over: str | bool) -> None:
    log.begin()
    log.begin(identity())
    for wrong in (None, False, "team/other", "llm"):
        with pytest.raises(OtherJobsRootError, match=r"belongs to team/llm.*team/new"):
            log.begin(identity(job="new", uid="u2"), take_over=wrong)
    with pytest.raises(OtherJobsRootError):
        log.begin(None)
    assert log.state.tail == 1
    log.begin(identity(job="new", uid="u2"), take_over=take_over)
    assert log.state.owner is not None
    assert log.state.owner.name == "team/new"


def test_a_resumed_claim_learns_what_went_in(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    claim = log.begin()
    slot = commit(log, claim, 10)
    again = Log(MemoryStore(bucket))
    state = again.resume(claim)
    found = state.commit_in(state.line[0].folder)
    assert found is not None
    assert found.slot == slot
    assert state.commit_in("never/written") is None
    assert commit(again, claim, 20) == 2
    with pytest.raises(FencedError, match="another root"):
        log.resume(Claim(slot=claim.slot, nonce="0" * 32))


@pytest.mark.parametrize("applied", [True, False])
def test_a_put_without_an_answer_is_put_again(bucket: MemoryBucket, applied: bool) -> None:
    log = Log(MemoryStore(bucket, hook=failing(2, applied=applied)), patience=IMPATIENT)
    claim = log.begin()
    assert (claim.slot, log.state.tail, len(bucket.objects)) == (0, 0, 1)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("settled", [True, False])
def test_an_unknown_outcome_is_settled_before_anything_else_is_appended(
    log: Log, bucket: MemoryBucket, applied: bool, settled: bool, commit: CommitStep
) -> None:
    claim = log.begin()
    lossy = unanswered_once(bucket, claim, applied=applied)
    with pytest.raises(UnknownOutcomeError, match=r"00000001\.json: no answer"):
        commit(lossy, claim, 10)
    if settled:
        record = lossy.settle()
        assert record is not None
        assert (record.slot, record.step, len(bucket.objects)) == (1, 10, 2)
    assert commit(lossy, claim, 20) == 2
    assert [record.step for record in lossy.state.line] == [20, 10]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("applied", [False, True])
def test_a_save_given_up_is_void_unless_it_went_in(
    log: Log, bucket: MemoryBucket, applied: bool, restarted: bool, commit: CommitStep
) -> None:
    claim = log.begin()
    lossy = unanswered_once(bucket, claim, applied=applied)
    with pytest.raises(UnknownOutcomeError):
        commit(lossy, claim, 10, "10/0-x")
    if restarted:
        lossy = Log(MemoryStore(bucket))
        lossy.resume(claim)
    record = lossy.void(claim, "took too long", "10/0-x")
    assert (log.refresh().tail, log.state.latest) == (1, record)
    assert (record is not None) == applied
    assert (b'"kind":"void"' in bucket.objects[slot_path(1)]) != applied


def test_a_refusal_is_no_unknown_outcome(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    claim = log.begin()
    refusing = failing(1, applied=False, error=StorageError("permission denied"))
    refused = Log(MemoryStore(bucket, hook=refusing))
    refused.resume(claim)
    with pytest.raises(StorageError, match="permission denied"):
        commit(refused, claim, 10)
    assert refused.settle() is None


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("restarted", [True, False])
def test_asked_again_for_the_same_begin_it_is_put_once(
    log: Log, bucket: MemoryBucket, commit: CommitStep, *, applied: bool, restarted: bool
) -> None:
    """Also by the successor of a lost process, which isn't fenced by its predecessor's begin."""
    claim = log.begin()
    first, second = commit(log, claim, 1), commit(log, claim, 2)
    lossy = Log(MemoryStore(bucket, hook=failing(1, applied=applied)), patience=NO_PATIENCE)
    with pytest.raises(UnknownOutcomeError):
        lossy.begin(base=first, after=claim, nonce=NONCE)
    asked = Log(MemoryStore(bucket)) if restarted else lossy
    back = asked.begin(base=first, after=claim, nonce=NONCE)
    assert back == Claim(slot=second + 1, nonce=NONCE)
    assert isinstance(asked.entry(back.slot).body, BeginEntry)
    commit(asked, back, 4)
    assert asked.begin(base=first, after=claim, nonce=NONCE) == back


@pytest.mark.parametrize(
    ("head", "step", "branches"), [(None, 0, False), (20, 21, False), (20, 20, True), (20, 1, True)]
)
def test_only_steps_greater_than_heads_go_on_from_it(head: int | None, step: int, branches: bool) -> None:
    ref = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)
    found = head and CommitRecord(slot=1, claim=0, step=head, folder="1/0-a", size_bytes=1, manifest=ref)
    theirs = head and ForeignBase(step=head, folder=str(head))
    assert must_branch(found or None, step) is must_branch(theirs or None, step) is branches


FOREIGN = ForeignBase(step=5, folder="5")


def commit_entry(step: int, parent: int | None, legacy: ForeignBase | None = None) -> CommitEntry:
    manifest = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)
    return CommitEntry(
        step=step, folder=f"{step}/0-a", size_bytes=1, manifest=manifest, parent=parent, legacy=legacy
    )


def apply_next(state: LogState, body: Body) -> LogState:
    return apply_body(state, state.tail + 1, 0, "a" * 32, body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (BeginEntry(base=2), "slot 4 names commit 2, which isn't live there"),
        (BeginEntry(base=7), "slot 4 names commit 7, which isn't live there"),
        (BeginEntry(base=1, legacy=FOREIGN), "slot 4 continues from two bases, commit 1 and "),
        (
            QuarantineEntry(commit=2, reason="again"),
            "slot 4 names commit 2, which isn't live there",
        ),
        (RestoredEntry(commit=2), "slot 4 names commit 2, which isn't live there"),
        (DeleteEntry(commits=(1, 7)), "slot 4 names commit 7, which doesn't exist"),
        (BeginEntry(base=1, branch=True), "begins a branch, but also continues from a base"),
        (BeginEntry(legacy=FOREIGN, branch=True), "begins a branch, but also continues from a base"),
        (BeginEntry(scratch=True, branch=True), "begins a branch, but also continues from a base"),
        (commit_entry(30, parent=2), "slot 4 has parent 2, but the log continues from 1 there"),
        (
            commit_entry(30, parent=1, legacy=FOREIGN),
            "slot 4 continues from ForeignBase.*, but the log from None there",
        ),
    ],
)
def test_an_entry_that_contradicts_those_before_it_is_refused(body: Body, message: str) -> None:
    """Slots 1 and 2 hold commits; slot 3 condemns the second."""
    before: list[Body] = [
        BeginEntry(),
        commit_entry(10, None),
        commit_entry(20, 1),
        QuarantineEntry(commit=2, reason="bad"),
    ]
    with pytest.raises(LogFormatError, match=message):
        apply_next(reduce(apply_next, before, LogState()), body)
