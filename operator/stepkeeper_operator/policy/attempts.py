"""The table of attempts: opened, closed with a cause, and corrected while better evidence can still come."""

from dataclasses import dataclass, replace
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    MAX_ATTEMPTS,
    Attempt,
    Bookkeeping,
    RestartsStatus,
    TrainingJobStatus,
)
from stepkeeper_operator.build.placement import on_spot
from stepkeeper_operator.evidence import AttemptEvidence
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.budgets import count_restart, move_restart, refill
from stepkeeper_operator.policy.causes import Circumstances, Finding, find_cause

__all__ = ["DELETED", "EDITED", "SUSPENDED", "Books", "account", "close_for_edit", "with_report"]

SUSPENDED: Final = "suspended"
EDITED: Final = "spec.template or spec.placement was changed"
DELETED: Final = "its JobSet was deleted"
_ASKED_FOR: Final = frozenset({SUSPENDED, EDITED, DELETED})
"""Ends that need no evidence: what the pods do then says nothing."""

_MESSAGE_LIMIT: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """The part of the status that says what was started, why it ended and what that cost."""

    attempts: tuple[Attempt, ...]
    restarts: RestartsStatus
    notes: Bookkeeping
    finding: Finding | None = None
    """Of the last attempt, if it has ended."""

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def open(self) -> bool:
        """True while an attempt runs."""
        return self.last is not None and self.last.end is None

    @property
    def ordinal(self) -> tuple[int, int]:
        """Of the last attempt of the current JobSet."""
        return (self.notes.job_sets - 1, self.notes.restarts_seen)


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
    books = _opened_books(job.status)
    if job.spec.suspend:
        # A person stops it: that is the look which many unexplained restarts wait for.
        books = replace(books, notes=books.notes.model_copy(update={"unexplained": 0}))
    if new_commit:
        books = _with_new_commit(books, job)
    books = _corrected(books, job, observed, now, reattribution_s)
    if jobset is None:
        evidence = observed.evidence_of(books.ordinal)
        return _close_as(books, evidence, _asked_for(DELETED), now) if books.open else books
    books = _caught_up(books, job, observed, jobset, now)
    if books.open and jobset.suspended:
        return _close_as(books, observed.evidence_of(books.ordinal), _asked_for(SUSPENDED), now)
    if books.open and _has_ended(books, observed, jobset):
        return _close(books, job, observed, jobset, now)
    if _may_open(books, jobset):
        return _open(books, now)
    return books


def close_for_edit(books: Books, observed: Observed, *, now: float) -> Books:
    """The running attempt ends because its pods are to look different."""
    return (
        _close_as(books, observed.evidence_of(books.ordinal), _asked_for(EDITED), now)
        if books.open
        else books
    )


def with_report(books: Books, observed: Observed) -> Books:
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


def _asked_for(message: str) -> Finding:
    return Finding(cause=Cause.REQUESTED, message=message)


def _opened_books(status: TrainingJobStatus) -> Books:
    return Books(attempts=status.attempts, restarts=status.restarts, notes=status.bookkeeping)


def _with_new_commit(books: Books, job: CheckpointedTrainingJob) -> Books:
    notes = books.notes.model_copy(update={"unexplained": 0})
    restarts = refill(books.restarts) if job.spec.restarts.reset_on_new_checkpoint else books.restarts
    return replace(books, restarts=restarts, notes=notes)


def _caught_up(
    books: Books, job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, now: float
) -> Books:
    """Every restart that JobSet did in place has its attempt, also those that nobody watched."""
    counted_left = jobset.restarts_counted - books.notes.counted_restarts_seen
    while books.notes.restarts_seen < jobset.restarts:
        if not books.notes.started:
            books = _open(books, now)
        if books.open:
            evidence, attempt = observed.evidence_of(books.ordinal), books.attempts[-1]
            counted = counted_left > 0
            finding = _find(job, observed, attempt, evidence, counted=counted, rule=jobset.rule)
            books = _close_as(books, evidence, finding, now)
        counted_left -= 1
        seen = books.notes.restarts_seen + 1
        books = replace(books, notes=books.notes.model_copy(update={"restarts_seen": seen}))
        books = _open(books, now)
    notes = books.notes.model_copy(update={"counted_restarts_seen": jobset.restarts_counted})
    return replace(books, notes=notes)


def _has_ended(books: Books, observed: Observed, jobset: JobSet) -> bool:
    evidence = observed.evidence_of(books.ordinal)
    return jobset.finished or (evidence is not None and bool(evidence.failed_jobs))


def _may_open(books: Books, jobset: JobSet) -> bool:
    if books.open or jobset.deleting or jobset.finished or jobset.suspend or jobset.suspended:
        return False
    resumed = books.last is not None and books.last.message == SUSPENDED
    return not books.notes.started or resumed


def _open(books: Books, now: float) -> Books:
    last = books.last
    restarts = books.restarts
    if last is not None and last.cause is not None:
        restarts = count_restart(restarts, last.cause)
    attempt = Attempt(number=1 if last is None else last.number + 1, start=int(now))
    return replace(
        books,
        attempts=(*books.attempts, attempt)[-MAX_ATTEMPTS:],
        restarts=restarts,
        notes=books.notes.model_copy(update={"started": True, "not_before": None}),
        finding=None,
    )


def _close(
    books: Books, job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, now: float
) -> Books:
    """The last attempt has ended, for the cause that the evidence gives."""
    evidence = observed.evidence_of(books.ordinal)
    if jobset.completed:
        return _close_as(books, evidence, _completion(evidence, observed), now)
    counted = True if jobset.failure_reason is not None else None
    finding = _find(job, observed, books.attempts[-1], evidence, counted=counted, rule=None)
    return _close_as(books, evidence, finding, now)


def _close_as(books: Books, evidence: AttemptEvidence | None, finding: Finding, now: float) -> Books:
    attempt = books.attempts[-1]
    closed = attempt.model_copy(
        update={
            "end": _end_of(evidence, attempt, now),
            "cause": finding.cause or None,
            "to_step": _last_step(evidence, attempt),
            "node": finding.node,
            "message": finding.message[:_MESSAGE_LIMIT],
        }
    )
    notes = books.notes
    if finding.message not in _ASKED_FOR:
        notes = notes.model_copy(update={"unexplained": 0 if finding.explained else notes.unexplained + 1})
    return replace(books, attempts=(*books.attempts[:-1], closed), notes=notes, finding=finding)


def _completion(evidence: AttemptEvidence | None, observed: Observed) -> Finding:
    """Every pod exited 0: done, unless the caller finds that a notice made them."""
    ends = [pod.termination for pod in evidence.pods if pod.termination is not None] if evidence else []
    notices = [end.notice for end in ends if end.notice is not None]
    if observed.report is not None and observed.report.report.notice is not None:
        notices.append(observed.report.report.notice)
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
    latest = job.status.checkpoint.latest if job.status.checkpoint is not None else None
    committed = ours and report is not None and bool(report.report.commits or report.commits)
    if latest is not None and latest.time is not None and latest.time >= attempt.start:
        committed = True
    known = Circumstances(
        nodes=observed.nodes,
        spot=on_spot(job.spec.placement),
        committed=committed,
        notice=report.report.notice if ours and report is not None else None,
        fatal_codes=frozenset(job.spec.restarts.fatal_exit_codes),
        counted=counted,
        rule=rule,
    )
    return find_cause(evidence, known)


def _corrected(
    books: Books, job: CheckpointedTrainingJob, observed: Observed, now: float, reattribution_s: int
) -> Books:
    """The newest ended attempt has the cause that the evidence gives by now.

    The survivors of a lost node fail long before the node is seen to be lost.
    """
    index = -2 if books.open else -1
    if len(books.attempts) < -index:
        return books
    attempt = books.attempts[index]
    if attempt.end is None or attempt.message in _ASKED_FOR or not attempt.cause:
        return books
    seen = [
        e
        for e in observed.evidence
        if e.ordinal < books.ordinal or (e.ordinal == books.ordinal and not books.open)
    ]
    evidence = max(seen, key=lambda e: e.ordinal, default=None)
    finding = _find(job, observed, attempt, evidence, counted=None, rule=None)
    if not books.open:
        books = replace(books, finding=_remembered(attempt, finding))
    elif now - attempt.end >= reattribution_s:
        return books
    if not finding.explained or finding.cause == attempt.cause:
        return books
    corrected = attempt.model_copy(
        update={"cause": finding.cause, "node": finding.node, "message": finding.message[:_MESSAGE_LIMIT]}
    )
    attempts = list(books.attempts)
    attempts[index] = corrected
    restarts = books.restarts
    if books.open:
        restarts = move_restart(restarts, source=attempt.cause, target=finding.cause)
    return replace(books, attempts=tuple(attempts), restarts=restarts)


def _remembered(attempt: Attempt, finding: Finding) -> Finding:
    """What was found when there was evidence holds when there is none any more."""
    if finding.explained or attempt.cause is None:
        return finding
    return replace(finding, cause=attempt.cause, message=attempt.message or "", node=attempt.node)


def _end_of(evidence: AttemptEvidence | None, attempt: Attempt, now: float) -> int:
    ends = [pod.finished_at for pod in evidence.pods if pod.finished_at is not None] if evidence else []
    return max(attempt.start, int(min([*ends, now])))


def _last_step(evidence: AttemptEvidence | None, attempt: Attempt) -> int | None:
    ends = [pod.termination for pod in evidence.pods if pod.termination is not None] if evidence else []
    steps = [attempt.to_step, *(end.step for end in ends)]
    return max((step for step in steps if step is not None), default=None)
