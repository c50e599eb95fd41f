"""Keeping the books: an attempt for every start, a cause for every end, corrected while better evidence can come."""

from dataclasses import replace

from stepkeeper.contract import Cause, ExitCode
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.build.placement import on_spot
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.budgets import move_restart, refill, with_limits
from stepkeeper_operator.policy.causes import Circumstances, Finding, find_cause
from stepkeeper_operator.policy.history import (
    ASKED_FOR,
    DELETED,
    EDITED,
    MESSAGE_LIMIT,
    SUSPENDED,
    Books,
    began,
    close_attempt,
    evidence_of,
    open_attempt,
)

__all__ = ["account", "close_for_edit"]


def account(
    job: CheckpointedTrainingJob,
    observed: Observed,
    jobset: JobSet | None,
    *,
    new_commit: bool,
    now: float,
    reattribution_s: int,
) -> Books:
    """The books after everything that was observed. `jobset` is the job's own."""
    books = _brought_forward(job, new_commit=new_commit)
    books = _corrected(books, job, observed, now=now, reattribution_s=reattribution_s)
    books = _follow_jobset(books, job, observed, jobset, now=now)
    books = _with_report(books, observed)
    return replace(books, restarts=with_limits(job.spec.restarts, books.restarts))


def _follow_jobset(
    books: Books, job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet | None, *, now: float
) -> Books:
    if jobset is None:
        return _close_as_asked(books, observed, DELETED, now=now) if books.open else books
    books = _caught_up(books, job, observed, jobset, now=now)
    if books.open and jobset.suspended:
        return _close_as_asked(books, observed, SUSPENDED, now=now)
    if books.open and _has_ended(books, observed, jobset):
        return _close(books, job, observed, jobset, now=now)
    return open_attempt(books, observed, now=now) if _may_open(books, jobset) else books


def close_for_edit(books: Books, observed: Observed, *, now: float) -> Books:
    """The running attempt ends because its pods are to look different."""
    return _close_as_asked(books, observed, EDITED, now=now) if books.open else books


def _with_report(books: Books, observed: Observed) -> Books:
    """The running attempt says where it began and how far it is."""
    last = observed.report
    if last is None or not books.open or last.ordinal != books.ordinal:
        return books
    attempt, report = books.attempts[-1], last.report
    update = {
        "from_step": attempt.from_step if report.restored is None else report.restored.step,
        "to_step": attempt.to_step if report.step is None else report.step,
    }
    return replace(books, attempts=(*books.attempts[:-1], attempt.model_copy(update=update)))


def _brought_forward(job: CheckpointedTrainingJob, *, new_commit: bool) -> Books:
    status = job.status
    restarts, notes = status.restarts, status.bookkeeping
    if new_commit and job.spec.restarts.reset_on_new_checkpoint:
        restarts = refill(restarts)
    # A person who suspends the job has seen what many unexplained restarts are waiting to be seen.
    if new_commit or job.spec.suspend:
        notes = notes.model_copy(update={"unexplained": 0})
    return Books(attempts=status.attempts, restarts=restarts, notes=notes)


def _caught_up(
    books: Books, job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, *, now: float
) -> Books:
    """Every restart that JobSet did in place has its attempt, also those that nobody watched."""
    counted_left = _counted_unseen(books, observed, jobset)
    while books.notes.restarts_seen < jobset.restarts:
        if not books.notes.started:
            books = open_attempt(books, observed, now=now)
        seen = {"restarts_seen": books.notes.restarts_seen + 1}
        evidence = evidence_of(books.attempts, books.ordinal, observed)
        counted = _taken_for_failure(evidence)
        if counted is None:
            counted = counted_left > 0 if books.open else books.attempts[-1].cause == Cause.APPLICATION_ERROR
            counted_left -= counted
        if books.open:
            finding = _find(job, observed, books.attempts[-1], evidence, counted=counted, rule=jobset.rule)
            next_books = replace(books, notes=books.notes.model_copy(update=seen))
            books = close_attempt(books, evidence, finding, now=began(next_books, observed, now=now))
        books = replace(books, notes=books.notes.model_copy(update=seen))
        books = open_attempt(books, observed, now=now)
    notes = books.notes.model_copy(update={"counted_restarts_seen": jobset.restarts_counted})
    return replace(books, notes=notes)


def _counted_unseen(books: Books, observed: Observed, jobset: JobSet) -> int:
    """How many of the restarts that JobSet counted as failures are of attempts whose end nobody saw."""
    ordinals = [(jobset.number, n) for n in range(books.notes.restarts_seen, jobset.restarts)]
    seen = sum(
        bool(_taken_for_failure(evidence_of(books.attempts, ordinal, observed))) for ordinal in ordinals
    )
    return jobset.restarts_counted - books.notes.counted_restarts_seen - seen


def _taken_for_failure(evidence: AttemptEvidence | None) -> bool | None:
    """Whether JobSet counts such an end as a failure, by the rules of its manifest; None: no end was seen."""
    if evidence is None:
        return None
    neutral = ("has condition ", f"exit code {ExitCode.SAVED.value} ")
    if evidence.failed_jobs:
        return not any(text in evidence.failed_jobs[0].failure_message for text in neutral)
    if any(pod.disruption or pod.hang or pod.exit_code == ExitCode.SAVED for pod in evidence.pods):
        return False
    return True if any(pod.phase == "Failed" for pod in evidence.pods) else None


def _has_ended(books: Books, observed: Observed, jobset: JobSet) -> bool:
    """One failed pod ends the gang: its Job has no retries. The Job says so a second later."""
    evidence = evidence_of(books.attempts, books.ordinal, observed)
    if evidence is None:
        return jobset.finished
    return (
        jobset.finished or bool(evidence.failed_jobs) or any(pod.phase == "Failed" for pod in evidence.pods)
    )


def _may_open(books: Books, jobset: JobSet) -> bool:
    if books.open or jobset.deleting or jobset.finished or jobset.suspend or jobset.suspended:
        return False
    resumed = books.last is not None and books.last.message == SUSPENDED
    return not books.notes.started or resumed


def _close_as_asked(books: Books, observed: Observed, message: str, *, now: float) -> Books:
    evidence = evidence_of(books.attempts, books.ordinal, observed)
    return close_attempt(books, evidence, Finding(cause=Cause.REQUESTED, message=message), now=now)


def _close(
    books: Books, job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, *, now: float
) -> Books:
    """The last attempt has ended, for the cause that the evidence gives."""
    evidence = evidence_of(books.attempts, books.ordinal, observed)
    if jobset.completed:
        return close_attempt(books, evidence, _completion(evidence, observed, jobset), now=now)
    counted = True if jobset.failure_reason is not None else None
    finding = _find(job, observed, books.attempts[-1], evidence, counted=counted, rule=None)
    return close_attempt(books, evidence, finding, now=now)


def _completion(evidence: AttemptEvidence | None, observed: Observed, jobset: JobSet) -> Finding:
    """Every pod exited 0: done, unless a notice made them."""
    ends = [pod.termination for pod in evidence.pods if pod.termination is not None] if evidence else []
    notices = [end.notice for end in ends if end.notice is not None]
    last = observed.report
    if last is not None and last.ordinal == jobset.ordinal and last.report.notice is not None:
        notices.append(last.report.notice)
    if not notices:
        return Finding(cause="", message="every pod exited 0")
    causes = [end.cause for end in ends if end.cause is not None]
    cause = causes[0] if causes else Cause.REQUESTED.value
    return Finding(cause=cause, message=f"every pod exited 0 after notice {notices[0]!r}")


def _find(
    job: CheckpointedTrainingJob,
    observed: Observed,
    attempt: Attempt,
    evidence: AttemptEvidence | None,
    *,
    counted: bool | None,
    rule: str | None,
) -> Finding:
    report = observed.report
    ours = evidence is not None and report is not None and report.ordinal == evidence.ordinal
    known = Circumstances(
        nodes=observed.nodes,
        spot=on_spot(job.spec.placement),
        committed=_has_committed(job, attempt)
        or (ours and report is not None and bool(report.report.commits)),
        notice=report.report.notice if ours and report is not None else None,
        fatal_codes=frozenset(job.spec.restarts.fatal_exit_codes),
        counted=counted,
        rule=rule,
    )
    return find_cause(evidence, known)


def _has_committed(job: CheckpointedTrainingJob, attempt: Attempt) -> bool:
    checkpoint = job.status.checkpoint
    if checkpoint is None or checkpoint.latest is None:
        return False
    in_time = checkpoint.latest.time is not None and checkpoint.latest.time >= attempt.start
    return in_time or (attempt.from_step is not None and checkpoint.latest.step > attempt.from_step)


def _corrected(
    books: Books, job: CheckpointedTrainingJob, observed: Observed, *, now: float, reattribution_s: int
) -> Books:
    """The newest ended attempt has the cause that the evidence gives by now.

    The survivors of a lost node fail long before the node is seen to be lost.
    """
    closed = books.attempts[:-1] if books.open else books.attempts
    if not closed:
        return books
    attempt = closed[-1]
    if attempt.end is None or attempt.message in ASKED_FOR or not attempt.cause:
        return books
    evidence = _evidence_of_ended(books, closed, observed)
    finding = _find(job, observed, attempt, evidence, counted=None, rule=None)
    if not books.open:
        books = replace(books, finding=_remembered(attempt, finding))
    elif now - attempt.end >= reattribution_s:
        return books
    if finding.explained and books.notes.unexplained:
        books = replace(books, notes=books.notes.model_copy(update={"unexplained": 0}))
    return (
        _with_cause(books, attempt, finding)
        if finding.explained and finding.cause != attempt.cause
        else books
    )


def _evidence_of_ended(
    books: Books, closed: tuple[Attempt, ...], observed: Observed
) -> AttemptEvidence | None:
    """What was seen of the newest ended attempt itself: another one's evidence says nothing of it."""
    number, restarts = books.ordinal
    if books.open:
        restarts -= 1
    elif not books.notes.started:
        restarts = -1
    if restarts >= 0:
        return evidence_of(closed, (number, restarts), observed)
    # It was the last of an earlier JobSet, whose count of restarts isn't known any more.
    ordinal = max((e.ordinal for e in observed.evidence if e.ordinal[0] < number), default=None)
    evidence = None if ordinal is None else evidence_of(closed, ordinal, observed)
    before = closed[-2].end if len(closed) > 1 else None
    if evidence is None or before is None or any(pod.created_at >= before for pod in evidence.pods):
        return evidence
    return None


def _with_cause(books: Books, attempt: Attempt, finding: Finding) -> Books:
    """The attempt has the cause that was found, and the restart after it counts for that one."""
    assert attempt.cause is not None  # the caller has looked at it
    corrected = attempt.model_copy(
        update={"cause": finding.cause, "node": finding.node, "message": finding.message[:MESSAGE_LIMIT]}
    )
    attempts = tuple(corrected if known is attempt else known for known in books.attempts)
    if not books.open:
        return replace(books, attempts=attempts)
    restarts = move_restart(books.restarts, source=attempt.cause, target=finding.cause)
    return replace(books, attempts=attempts, restarts=restarts)


def _remembered(attempt: Attempt, finding: Finding) -> Finding:
    """What was found when there was evidence holds when there is none any more."""
    if finding.explained or attempt.cause is None:
        return finding
    return replace(finding, cause=attempt.cause, message=attempt.message or "", node=attempt.node)
