"""Open and close attempts in the history of a job, and find the evidence of one."""

from dataclasses import replace
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob_status import MAX_ATTEMPTS, Attempt
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.budgets import count_restart
from stepkeeper_operator.policy.causes import Finding
from stepkeeper_operator.policy.history import JobHistory

__all__ = [
    "DELETED",
    "EDITED",
    "MESSAGE_LIMIT",
    "SUSPENDED",
    "close_as_requested",
    "close_attempt",
    "close_without_machines",
    "find_attempt_evidence",
    "find_start",
    "open_attempt",
    "was_asked_for",
    "was_suspended",
]

SUSPENDED: Final = "suspended"
EDITED: Final = "spec.template or spec.placement was changed"
DELETED: Final = "its JobSet was deleted"
_NO_MACHINES: Final = f"{SUSPENDED}: "
"""Beginning of the message where the job was suspended because its QueuedResource has no machines for it."""

_NEVER_RAN: Final = f"{SUSPENDED} before all of its pods ran: "
"""Beginning of the message where that happened to an attempt before it ran: it is over, and nothing restarts it."""

_REQUESTED_ENDS: Final = frozenset({SUSPENDED, EDITED, DELETED})

MESSAGE_LIMIT: Final = 1024


def open_attempt(history: JobHistory, observed: Observed, *, now: float) -> JobHistory:
    """Add the next attempt, and count the restart for the cause of the last attempt's end.

    After an attempt that never ran there is nothing to count: the restart that made it was counted.
    """
    last = history.last_attempt
    restarts = history.restarts
    if last is not None and last.cause is not None and not (last.message or "").startswith(_NEVER_RAN):
        restarts = count_restart(restarts, last.cause)
    earliest = 0 if last is None or last.end is None else last.end
    start = max(earliest, int(find_start(history, observed, now=now)))
    attempt = Attempt(number=1 if last is None else last.number + 1, start=start)
    return replace(
        history,
        attempts=(*history.attempts, attempt)[-MAX_ATTEMPTS:],
        restarts=restarts,
        bookkeeping=history.bookkeeping.model_copy(update={"started": True, "not_before": None}),
        finding=None,
    )


def close_attempt(
    history: JobHistory, evidence: AttemptEvidence | None, finding: Finding, *, now: float
) -> JobHistory:
    """Close the last attempt with `finding`."""
    attempt = history.attempts[-1]
    closed = attempt.model_copy(
        update={
            "end": _find_end(evidence, attempt, now),
            "cause": finding.cause or None,
            "to_step": _find_last_step(evidence, attempt),
            "node": finding.node,
            "message": finding.message[:MESSAGE_LIMIT],
        }
    )
    bookkeeping = history.bookkeeping
    if not was_asked_for(finding.message):
        bookkeeping = bookkeeping.model_copy(
            update={"unexplained": 0 if finding.explained else bookkeeping.unexplained + 1}
        )
    return replace(
        history, attempts=(*history.attempts[:-1], closed), bookkeeping=bookkeeping, finding=finding
    )


def close_as_requested(history: JobHistory, observed: Observed, message: str, *, now: float) -> JobHistory:
    """Close the running attempt, if there is one, because somebody asked for its end: SUSPENDED, EDITED or DELETED."""
    if not history.is_running:
        return history
    evidence = find_attempt_evidence(history.attempts, history.ordinal, observed)
    return close_attempt(history, evidence, Finding(cause=Cause.REQUESTED, message=message), now=now)


def close_without_machines(
    history: JobHistory, observed: Observed, cause: Cause, message: str, *, n_hosts: int, now: float
) -> JobHistory:
    """Close the running attempt because the job, on so many hosts, was suspended for want of machines.

    JobSet may have restarted the pods in place after the machines' end, before the job was suspended: that attempt
    finds no machines and never runs.
    """
    evidence = find_attempt_evidence(history.attempts, history.ordinal, observed)
    begin = _NO_MACHINES if _has_run(history.attempts[-1], evidence, n_hosts) else _NEVER_RAN
    finding = Finding(cause=cause, message=f"{begin}{message}")
    return close_attempt(history, evidence, finding, now=now)


def _has_run(attempt: Attempt, evidence: AttemptEvidence | None, n_hosts: int) -> bool:
    """Return True if the attempt reported a step, or had a pod on each host that ran."""
    if attempt.from_step is not None or attempt.to_step is not None:
        return True
    return evidence is not None and len({pod.rank for pod in evidence.pods if pod.started}) >= n_hosts


def was_suspended(message: str | None) -> bool:
    """Return True for the message of an attempt that a suspension ended: the next one has the same ordinal."""
    return message is not None and (message == SUSPENDED or message.startswith((_NO_MACHINES, _NEVER_RAN)))


def was_asked_for(message: str | None) -> bool:
    """Return True for the message of an end that needs no evidence: the pods' ends prove nothing about it."""
    return message in _REQUESTED_ENDS or was_suspended(message)


def find_attempt_evidence(
    attempts: tuple[Attempt, ...], ordinal: tuple[int, int], observed: Observed
) -> AttemptEvidence | None:
    """Find the evidence of the last of these attempts.

    A suspension doesn't change JobSet's count of restarts, so the pods of two attempts have the same labels
    then.
    """
    evidence = observed.find_evidence(ordinal)
    before = attempts[-2] if len(attempts) > 1 else None
    if evidence is None or before is None or not was_suspended(before.message) or before.end is None:
        return evidence
    since = before.end
    return replace(evidence, pods=tuple(pod for pod in evidence.pods if pod.created_at >= since))


def find_start(history: JobHistory, observed: Observed, *, now: float) -> float:
    """Return when the first pod of the history's ordinal was made, or `now` if none was seen."""
    evidence = observed.find_evidence(history.ordinal)
    created = [pod.created_at for pod in evidence.pods] if evidence is not None else []
    return min([*created, now])


def _find_end(evidence: AttemptEvidence | None, attempt: Attempt, now: float) -> int:
    ends = [pod.finished_at for pod in evidence.pods if pod.finished_at is not None] if evidence else []
    return max(attempt.start, int(min([*ends, now])))


def _find_last_step(evidence: AttemptEvidence | None, attempt: Attempt) -> int | None:
    ends = [pod.termination for pod in evidence.pods if pod.termination is not None] if evidence else []
    steps = [attempt.to_step, *(end.step for end in ends)]
    return max((step for step in steps if step is not None), default=None)
