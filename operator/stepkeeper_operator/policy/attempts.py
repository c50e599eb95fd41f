"""Open and close the attempts in the history of a job."""

from dataclasses import replace
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob_status import MAX_ATTEMPTS, Attempt
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import find_attempt_evidence, find_new_pods, find_start
from stepkeeper_operator.policy.budgets import add_restarts
from stepkeeper_operator.policy.causes.find_cause import add_decision
from stepkeeper_operator.policy.history import Finding, JobHistory
from stepkeeper_operator.policy.pod_ends import is_masked

__all__ = [
    "DELETED",
    "EDITED",
    "MESSAGE_LIMIT",
    "NOT_ALLOWED",
    "SUSPENDED",
    "close_as_requested",
    "close_attempt",
    "close_displaced",
    "open_attempt",
    "open_if_started",
    "tell_decision",
    "was_asked_for",
    "was_suspended",
    "withdraw_attempt",
]

SUSPENDED: Final = "suspended"
EDITED: Final = "spec.template or spec.placement was changed"
DELETED: Final = "its JobSet was deleted"
NOT_ALLOWED: Final = "the job had no restart left"
"""JobSet had begun one more start before the operator saw the last end."""

_WITH_REASON: Final = f"{SUSPENDED}: "
"""Beginning of the message where more is known of the end than that the job was suspended."""

_REQUESTED_ENDS: Final = frozenset({SUSPENDED, EDITED, DELETED, NOT_ALLOWED})

MESSAGE_LIMIT: Final = 1024


def open_attempt(history: JobHistory, observed: Observed, *, now: float) -> JobHistory:
    """Add the next attempt, and count the restart for the cause of the last attempt's end."""
    last = history.last_attempt
    restarts = history.restarts
    if last is not None and last.cause is not None:
        restarts = add_restarts(restarts, last.cause, 1)
    earliest = 0 if last is None or last.end is None else last.end
    start = max(earliest, int(find_start(history, observed, now=now)))
    attempt = Attempt(number=1 if last is None else last.number + 1, start=start)
    noted: dict[str, object] = {
        "started": True,
        "not_before": None,
        "starts_without_checkpoint": history.bookkeeping.starts_without_checkpoint + 1,
    }
    if observed.jobset is not None:
        noted["started_template"] = observed.jobset.template_hash
    return replace(
        history,
        attempts=(*history.attempts, attempt)[-MAX_ATTEMPTS:],
        restarts=restarts,
        bookkeeping=history.bookkeeping.model_copy(update=noted),
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
    return replace(history, attempts=(*history.attempts[:-1], closed), finding=finding)


def close_as_requested(history: JobHistory, observed: Observed, message: str, *, now: float) -> JobHistory:
    """Close the running attempt, if there is one, for a reason that isn't its own.

    The message is SUSPENDED, EDITED, DELETED or NOT_ALLOWED.
    """
    if not history.is_running:
        return history
    return _close_without_evidence(history, observed, Cause.REQUESTED, message, now=now)


def close_displaced(
    history: JobHistory, observed: Observed, cause: Cause, message: str, *, now: float
) -> JobHistory:
    """Close the running attempt because the job was suspended for want of machines or quota."""
    return _close_without_evidence(history, observed, cause, f"{_WITH_REASON}{message}", now=now)


def _close_without_evidence(
    history: JobHistory, observed: Observed, cause: Cause, message: str, *, now: float
) -> JobHistory:
    """Close the running attempt for a cause that its pods don't give. They may say what they have saved."""
    evidence = find_attempt_evidence(history, observed)
    finding = Finding(cause=cause, message=tell_decision(message, evidence))
    return close_attempt(history, evidence, finding, now=now)


def tell_decision(message: str, evidence: AttemptEvidence | None) -> str:
    """Add to the message of an end what its pods say that they chose to save."""
    pods = () if evidence is None else evidence.pods
    return add_decision(message, pods, behind=": " if message == SUSPENDED else "; ")


def withdraw_attempt(history: JobHistory) -> JobHistory:
    """Take back the running attempt, and the restart that it counted for: it came to nothing, or had nothing to do."""
    before = history.attempts[-2] if len(history.attempts) > 1 else None
    restarts = history.restarts
    if before is not None and before.cause is not None:
        restarts = add_restarts(restarts, before.cause, -1)
    starts = max(0, history.bookkeeping.starts_without_checkpoint - 1)
    bookkeeping = history.bookkeeping.model_copy(update={"starts_without_checkpoint": starts})
    return replace(history, attempts=history.attempts[:-1], restarts=restarts, bookkeeping=bookkeeping)


def was_suspended(message: str | None) -> bool:
    """Return True for the message of an attempt that a suspension ended: the next one has the same ordinal."""
    return message is not None and (message == SUSPENDED or message.startswith(_WITH_REASON))


def was_asked_for(message: str | None) -> bool:
    """Return True for the message of an end that needs no evidence: the pods' ends prove nothing about it."""
    asked_for = None if message is None else message.partition("; ")[0]
    return asked_for in _REQUESTED_ENDS or was_suspended(message)


def _find_end(evidence: AttemptEvidence | None, attempt: Attempt, now: float) -> int:
    """Find when the first pod failed, or else when the last one exited 0: those before it end nothing."""
    pods = () if evidence is None else evidence.pods
    failed = [pod.finished_at for pod in pods if _has_failed(pod) and pod.finished_at is not None]
    done = [pod.finished_at for pod in pods if pod.phase == "Succeeded" and pod.finished_at is not None]
    last = max(done) if done and len(done) == len(pods) else now
    return max(attempt.start, int(min(now, min(failed, default=last))))


def _has_failed(pod: Pod) -> bool:
    return pod.phase == "Failed" or (pod.phase == "Succeeded" and is_masked(pod))


def _find_last_step(evidence: AttemptEvidence | None, attempt: Attempt) -> int | None:
    ends = [pod.termination for pod in evidence.pods if pod.termination is not None] if evidence else []
    steps = [attempt.to_step, *(end.step for end in ends)]
    return max((step for step in steps if step is not None), default=None)


def open_if_started(history: JobHistory, observed: Observed, jobset: JobSet, *, now: float) -> JobHistory:
    """Open an attempt for the first start of a JobSet, or for pods that it made since without counting a restart."""
    if jobset.deleting or jobset.is_finished or jobset.suspend or jobset.suspended:
        return history
    if not history.bookkeeping.started:
        return open_attempt(history, observed, now=now)
    since = _find_resumption(history, observed, jobset, now=now)
    if since is None:
        return history
    resumed = {"resumed_at": since}
    history = replace(history, bookkeeping=history.bookkeeping.model_copy(update=resumed))
    return open_attempt(history, observed, now=now)


def _find_resumption(history: JobHistory, observed: Observed, jobset: JobSet, *, now: float) -> int | None:
    """Find the Unix time since which the pods are of the next attempt. None: none has begun."""
    if _was_resumed(history, jobset) and not _will_be_restarted(history, observed):
        return int(now if jobset.resumed_at is None else jobset.resumed_at)
    return find_new_pods(history, observed)


def _was_resumed(history: JobHistory, jobset: JobSet) -> bool:
    """Tell whether a suspension that the last attempt ended in, or that came after its end, is over."""
    last = history.last_attempt
    if last is None:
        return True  # the attempt before the suspension was withdrawn
    if last.end is None:
        return False
    resumed_since = jobset.resumed_at is not None and jobset.resumed_at > last.end
    return resumed_since or was_suspended(last.message)


def _will_be_restarted(history: JobHistory, observed: Observed) -> bool:
    """Tell whether JobSet still has to act on a failed Job: the next pods are of the next ordinal."""
    evidence = observed.find_evidence(history.ordinal)
    return evidence is not None and bool(evidence.failed_batch_jobs)
