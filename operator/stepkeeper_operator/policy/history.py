"""The books: the table of attempts, what restarts cost, and the operator's own notes. Opening and closing entries."""

from dataclasses import dataclass, replace
from typing import Final

from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    MAX_ATTEMPTS,
    Attempt,
    Bookkeeping,
    RestartsStatus,
)
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.budgets import count_restart
from stepkeeper_operator.policy.causes import Finding

__all__ = [
    "ASKED_FOR",
    "DELETED",
    "EDITED",
    "MESSAGE_LIMIT",
    "SUSPENDED",
    "Books",
    "began",
    "close_attempt",
    "evidence_of",
    "open_attempt",
]

SUSPENDED: Final = "suspended"
EDITED: Final = "spec.template or spec.placement was changed"
DELETED: Final = "its JobSet was deleted"
ASKED_FOR: Final = frozenset({SUSPENDED, EDITED, DELETED})
"""Messages of ends that need no evidence: what the pods do then says nothing."""

MESSAGE_LIMIT: Final = 1024


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


def open_attempt(books: Books, observed: Observed, *, now: float) -> Books:
    """The next attempt runs, and the restart that it is counts for the cause of the last one's end."""
    last = books.last
    restarts = books.restarts
    if last is not None and last.cause is not None:
        restarts = count_restart(restarts, last.cause)
    earliest = 0 if last is None or last.end is None else last.end
    start = max(earliest, int(began(books, observed, now=now)))
    attempt = Attempt(number=1 if last is None else last.number + 1, start=start)
    return replace(
        books,
        attempts=(*books.attempts, attempt)[-MAX_ATTEMPTS:],
        restarts=restarts,
        notes=books.notes.model_copy(update={"started": True, "not_before": None}),
        finding=None,
    )


def close_attempt(books: Books, evidence: AttemptEvidence | None, finding: Finding, *, now: float) -> Books:
    """The last attempt has ended as was found."""
    attempt = books.attempts[-1]
    closed = attempt.model_copy(
        update={
            "end": _end_of(evidence, attempt, now),
            "cause": finding.cause or None,
            "to_step": _last_step(evidence, attempt),
            "node": finding.node,
            "message": finding.message[:MESSAGE_LIMIT],
        }
    )
    notes = books.notes
    if finding.message not in ASKED_FOR:
        notes = notes.model_copy(update={"unexplained": 0 if finding.explained else notes.unexplained + 1})
    return replace(books, attempts=(*books.attempts[:-1], closed), notes=notes, finding=finding)


def evidence_of(
    attempts: tuple[Attempt, ...], ordinal: tuple[int, int], observed: Observed
) -> AttemptEvidence | None:
    """What was seen of the last of these attempts.

    A suspension leaves JobSet's count of restarts as it is: the pods of two attempts bear the same labels then.
    """
    evidence = observed.evidence_of(ordinal)
    before = attempts[-2] if len(attempts) > 1 else None
    if evidence is None or before is None or before.message != SUSPENDED or before.end is None:
        return evidence
    since = before.end
    return replace(evidence, pods=tuple(pod for pod in evidence.pods if pod.created_at >= since))


def began(books: Books, observed: Observed, *, now: float) -> float:
    """When the first pod of the books' ordinal was made, as far as any was seen."""
    evidence = observed.evidence_of(books.ordinal)
    created = [pod.created_at for pod in evidence.pods] if evidence is not None else []
    return min([*created, now])


def _end_of(evidence: AttemptEvidence | None, attempt: Attempt, now: float) -> int:
    ends = [pod.finished_at for pod in evidence.pods if pod.finished_at is not None] if evidence else []
    return max(attempt.start, int(min([*ends, now])))


def _last_step(evidence: AttemptEvidence | None, attempt: Attempt) -> int | None:
    ends = [pod.termination for pod in evidence.pods if pod.termination is not None] if evidence else []
    steps = [attempt.to_step, *(end.step for end in ends)]
    return max((step for step in steps if step is not None), default=None)
