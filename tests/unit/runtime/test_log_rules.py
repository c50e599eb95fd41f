"""Test which process may append what to the log: claims, owners, bases, HEAD and lines."""

from collections.abc import Callable

import pytest

from stepkeeper.contract import Identity
from stepkeeper.errors import (
    FencedError,
    OtherJobsRootError,
    RestoreError,
    StorageError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.log import Claim, Log
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.pod import pod_identity

CommitStep = Callable[..., int]
NO_PATIENCE = Patience(total_s=0, sleep=lambda _: None)
IMPATIENT = Patience(total_s=0.2, sleep=lambda _: None)


def identity(job: str = "llm", uid: str = "u1", ordinal: tuple[int, int] = (0, 0)) -> Identity:
    jobset_number, restart_attempt = ordinal
    return pod_identity(
        namespace="team", job=job, job_uid=uid, jobset_number=jobset_number, restart_attempt=restart_attempt
    )


def failing(times: int, *, applied: bool, operation: str = "put_if_absent") -> Callable[..., None]:
    """A hook: the first `times` calls of `operation` get no answer."""
    left = [times]

    def hook(moment: str, called: str, path: str) -> None:
        if called == operation and moment == ("after" if applied else "before") and left[0]:
            left[0] -= 1
            raise TransientStorageError("no answer")

    return hook


def unanswered_once(bucket: MemoryBucket, claim: Claim, *, applied: bool) -> Log:
    """A log that goes on with the claim, and whose next put gets no answer."""
    log = Log(MemoryStore(bucket, hook=failing(1, applied=applied)), patience=NO_PATIENCE)
    log.resume(claim)
    return log


def test_an_empty_root_has_no_latest(log: Log) -> None:
    state = log.open()
    assert (state.tail, state.latest, state.line, state.root) == (-1, None, (), None)


def test_commits_move_head_and_make_a_line(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    claim = log.begin()
    slots = [commit(log, claim, step) for step in (10, 20, 30)]
    state = Log(MemoryStore(bucket)).open()
    assert state == log.state
    assert [record.step for record in state.line] == [30, 20, 10]
    assert state.latest is not None
    assert state.latest.slot == slots[-1]
    assert state.root == claim.nonce


def test_a_later_begin_fences_the_earlier_claim(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    claim = log.begin()
    commit(log, claim, 10)
    other = Log(MemoryStore(bucket))
    later = other.begin()
    for append in (
        lambda: commit(log, claim, 20),
        lambda: log.delete(claim, lambda state: [1]),
        lambda: log.quarantine(claim, 1, "bad"),
        lambda: log.mark_restored(claim, 1),
        lambda: log.void(claim, "late", "10/0-x"),
    ):
        with pytest.raises(FencedError, match=f"claim {claim.slot} is stale: slot {later.slot}"):
            append()
    assert other.refresh().tail == later.slot


def test_a_begin_goes_on_from_head_unless_told(log: Log, commit: CommitStep) -> None:
    claim = log.begin()
    first, second = commit(log, claim, 10), commit(log, claim, 20)
    log.begin()
    assert log.state.head == second
    log.begin(base=first)
    assert [record.step for record in log.state.line] == [10]
    assert [record.slot for record in log.state.live] == [first, second]
    log.begin(scratch=True)
    assert log.state.head is None


def test_a_root_whose_commits_were_all_condemned_is_begun_anew_only_when_told(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    claim = log.begin()
    condemned = commit(log, claim, 10)
    log.quarantine(claim, condemned, "block 3 of 9")
    for there in (log, Log(MemoryStore(bucket))):
        with pytest.raises(RestoreError, match=rf"quarantined: {condemned} \(step 10\).*scratch=True"):
            there.begin()
    with pytest.raises(RestoreError, match="quarantined"):
        log.latest(claim)
    assert log.state.tail == condemned + 1, "nothing was appended"

    anew = log.begin(scratch=True)
    assert log.latest(anew) is None
    again = Log(MemoryStore(bucket))
    claim = again.begin()
    assert again.state.head is None, "the answer of the start before holds until there is a commit"
    again.quarantine(claim, commit(again, claim, 10), "block 4 of 9")
    with pytest.raises(RestoreError, match="quarantined"):
        again.begin()


def test_a_begin_that_goes_on_from_a_condemned_commit_is_no_answer_to_begin_anew(
    log: Log, commit: CommitStep
) -> None:
    claim = log.begin()
    condemned = commit(log, claim, 10)
    log.quarantine(log.begin(), condemned, "block 3 of 9")
    with pytest.raises(RestoreError, match="quarantined"):
        log.begin()


def test_the_latest_of_a_stale_claim_is_not_told(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    claim = log.begin()
    assert log.latest(claim) is None
    first = commit(log, claim, 10)
    latest = log.latest(claim)
    assert latest is not None
    assert latest.slot == first
    Log(MemoryStore(bucket)).begin()
    with pytest.raises(FencedError, match="stale"):
        log.latest(claim)


def test_a_base_that_is_no_live_commit_is_refused(log: Log, commit: CommitStep) -> None:
    claim = log.begin()
    slot = commit(log, claim, 10)
    with pytest.raises(RestoreError, match=r"commit 0 doesn't exist.* live commits: 1 \(step 10\)"):
        log.begin(base=claim.slot)
    log.quarantine(claim, slot, "a bad block")
    with pytest.raises(RestoreError, match="commit 1 is quarantined; live commits: none"):
        log.begin(base=slot)


def test_a_branch_after_a_rollback_leaves_the_abandoned_one_out(log: Log, commit: CommitStep) -> None:
    claim = log.begin()
    first, abandoned = commit(log, claim, 10), commit(log, claim, 20)
    later = log.begin(base=first)
    new = commit(log, later, 15)
    assert [record.slot for record in log.state.line] == [new, first]
    assert abandoned in log.state.commits


def test_deleting_relinks_the_line(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    claim = log.begin()
    slots = [commit(log, claim, step) for step in (10, 20, 30, 40)]
    deleted = log.delete(claim, lambda state: slots[1:3])
    assert [record.step for record in deleted] == [20, 30]
    assert [record.step for record in log.state.line] == [40, 10]
    assert Log(MemoryStore(bucket)).open() == log.state


def test_deleting_nothing_appends_nothing(log: Log) -> None:
    claim = log.begin()
    assert log.delete(claim, lambda state: []) == ()
    assert log.state.tail == claim.slot


def test_quarantine_moves_head_to_the_nearest_live_ancestor_and_keeps_the_record(
    log: Log, commit: CommitStep
) -> None:
    claim = log.begin()
    slots = [commit(log, claim, step) for step in (10, 20, 30)]
    log.delete(claim, lambda state: [slots[1]])
    head = log.quarantine(claim, slots[2], "block 3 of 9")
    assert head is not None
    assert head.slot == slots[0]
    assert log.state.commits[slots[2]].quarantined
    assert log.state.live == (head,)


def test_a_restored_commit_is_marked_verified_and_head_stays(log: Log, commit: CommitStep) -> None:
    claim = log.begin()
    first, second = commit(log, claim, 10), commit(log, claim, 20)
    log.mark_restored(claim, first)
    assert log.state.commits[first].verified
    assert log.state.head == second


def test_an_older_start_of_the_same_job_is_fenced(log: Log) -> None:
    log.begin(identity(ordinal=(1, 3)), host="node-a")
    for older in ((1, 2), (0, 9)):
        with pytest.raises(
            FencedError, match=r"start \[1, 3\] of team/llm on host node-a has claimed this root"
        ):
            log.begin(identity(ordinal=older))
    log.begin(identity(ordinal=(1, 3)))
    log.begin(identity(uid="u2", ordinal=(0, 0)))
    with pytest.raises(FencedError, match=r"\[1, 3\]"):
        log.begin(identity(ordinal=(1, 0)))
    assert log.state.tail == 2


@pytest.mark.parametrize("take_over", [True, "team/llm"])
def test_another_jobs_root_needs_a_take_over(log: Log, take_over: str | bool) -> None:
    log.begin(identity())
    for wrong in (None, False, "team/other", "llm"):
        with pytest.raises(OtherJobsRootError, match=r"belongs to team/llm.*team/new"):
            log.begin(identity(job="new", uid="u2"), take_over=wrong)
    with pytest.raises(OtherJobsRootError):
        log.begin(None)
    assert log.state.tail == 0
    log.begin(identity(job="new", uid="u2"), take_over=take_over)
    assert log.state.owner is not None
    assert log.state.owner.name == "team/new"


def test_a_root_begun_by_hand_belongs_to_no_job(log: Log) -> None:
    log.begin()
    log.begin(identity())
    assert log.state.claim == 1


def test_a_resumed_claim_learns_what_went_in(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    claim = log.begin()
    slot = commit(log, claim, 10)
    again = Log(MemoryStore(bucket))
    state = again.resume(claim)
    found = state.commit_in(state.line[0].folder)
    assert found is not None
    assert found.slot == slot
    assert state.commit_in("never/written") is None
    commit(again, claim, 20)
    log.begin()
    with pytest.raises(FencedError, match="stale"):
        Log(MemoryStore(bucket)).resume(claim)


def test_a_claim_of_another_root_is_refused(log: Log) -> None:
    claim = log.begin()
    with pytest.raises(FencedError, match="another root"):
        log.resume(Claim(slot=claim.slot, nonce="0" * 32))


@pytest.mark.parametrize("applied", [True, False])
def test_a_put_without_an_answer_is_put_again(bucket: MemoryBucket, applied: bool) -> None:
    log = Log(MemoryStore(bucket, hook=failing(2, applied=applied)), patience=IMPATIENT)
    claim = log.begin()
    assert (claim.slot, log.state.tail, len(bucket.objects)) == (0, 0, 1)


@pytest.mark.parametrize("applied", [True, False])
def test_an_unknown_outcome_is_settled(
    log: Log, bucket: MemoryBucket, applied: bool, commit: CommitStep
) -> None:
    claim = log.begin()
    lossy = unanswered_once(bucket, claim, applied=applied)
    with pytest.raises(UnknownOutcomeError, match=r"00000001\.json: no answer"):
        commit(lossy, claim, 10)
    record = lossy.settle()
    assert record is not None
    assert (record.slot, record.step, lossy._pending, len(bucket.objects)) == (1, 10, None, 2)
    assert commit(lossy, claim, 20) == 2


def test_nothing_else_is_appended_before_an_unknown_outcome_is_settled(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    claim = log.begin()
    lossy = unanswered_once(bucket, claim, applied=False)
    with pytest.raises(UnknownOutcomeError):
        commit(lossy, claim, 10)
    assert lossy._pending is not None
    assert lossy.state.tail == 0
    commit(lossy, claim, 20)
    assert [record.step for record in lossy.state.line] == [20, 10]


def test_a_save_given_up_is_void_and_its_late_put_finds_the_slot_taken(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    claim = log.begin()
    lossy = unanswered_once(bucket, claim, applied=False)
    with pytest.raises(UnknownOutcomeError):
        commit(lossy, claim, 10)
    assert lossy.void(claim, "took too long", "10/0-x") is None
    assert (log.refresh().tail, log.state.head) == (1, None)
    assert b'"kind":"void"' in bucket.objects[slot_path(1)]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_save_given_up_that_went_in_is_said_to_be_committed(
    log: Log, bucket: MemoryBucket, restarted: bool, commit: CommitStep
) -> None:
    claim = log.begin()
    lossy = unanswered_once(bucket, claim, applied=True)
    with pytest.raises(UnknownOutcomeError):
        commit(lossy, claim, 10, "10/0-x")
    if restarted:
        lossy = Log(MemoryStore(bucket))
        lossy.resume(claim)
    record = lossy.void(claim, "took too long", "10/0-x")
    assert record is not None
    assert (record.step, lossy.state.tail) == (10, 1)


def test_what_a_dead_process_put_comes_too_late_after_its_successors_void(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    claim = log.begin()
    late = MemoryBucket()
    late.objects = dict(bucket.objects)
    stuck = Log(MemoryStore(late))
    stuck.resume(claim)
    commit(stuck, claim, 10, "10/0-x")
    assert log.void(claim, "its process died", "10/0-x") is None
    assert not MemoryStore(bucket).put_if_absent(slot_path(1), late.objects[slot_path(1)])
    assert Log(MemoryStore(bucket)).open().head is None


def test_a_refusal_is_no_unknown_outcome(log: Log, bucket: MemoryBucket, commit: CommitStep) -> None:
    claim = log.begin()

    def hook(moment: str, operation: str, path: str) -> None:
        if operation == "put_if_absent":
            raise StorageError("permission denied")

    refused = Log(MemoryStore(bucket, hook=hook))
    refused.resume(claim)
    with pytest.raises(StorageError, match="permission denied"):
        commit(refused, claim, 10)
    assert refused._pending is None
