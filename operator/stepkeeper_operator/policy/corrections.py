"""Correct the cause of an ended attempt while better evidence can come."""

from dataclasses import replace

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempts import (
    MESSAGE_LIMIT,
    find_attempt_evidence,
    was_asked_for,
)
from stepkeeper_operator.policy.budgets import move_restart
from stepkeeper_operator.policy.causes import Finding, find_cause
from stepkeeper_operator.policy.circumstances import gather_circumstances
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.machines import is_explained_by_machines

__all__ = ["correct_cause"]


def correct_cause(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, *, now: float, reattribution_s: int
) -> JobHistory:
    """Give the newest ended attempt the cause that the evidence shows by now.

    The survivors of a lost node fail long before the node is seen to be lost.
    """
    closed = history.attempts[:-1] if history.is_running else history.attempts
    if not closed:
        return history
    attempt = closed[-1]
    if attempt.end is None or was_asked_for(attempt.message) or not attempt.cause:
        return history
    if is_explained_by_machines(job, attempt.message):
        return history
    evidence = _find_evidence_of_ended(history, closed, observed)
    circumstances = gather_circumstances(job, observed, attempt, evidence, counted=None, rule=None, now=now)
    finding = find_cause(evidence, circumstances)
    if not history.is_running:
        history = replace(history, finding=_keep_known_cause(attempt, finding))
    elif now - attempt.end >= reattribution_s:
        return history
    if finding.explained and history.bookkeeping.unexplained:
        history = replace(history, bookkeeping=history.bookkeeping.model_copy(update={"unexplained": 0}))
    return (
        _replace_cause(history, attempt, finding)
        if finding.explained and finding.cause != attempt.cause
        else history
    )


def _find_evidence_of_ended(
    history: JobHistory, closed: tuple[Attempt, ...], observed: Observed
) -> AttemptEvidence | None:
    """Find the evidence of the newest ended attempt itself: another attempt's evidence proves nothing about it."""
    number, restarts = history.ordinal
    if history.is_running:
        restarts -= 1
    elif not history.bookkeeping.started:
        restarts = -1
    if restarts >= 0:
        return find_attempt_evidence(closed, (number, restarts), observed)
    # It was the last of an earlier JobSet, whose count of restarts isn't known any more.
    ordinal = max((e.ordinal for e in observed.evidence if e.ordinal[0] < number), default=None)
    evidence = None if ordinal is None else find_attempt_evidence(closed, ordinal, observed)
    before = closed[-2].end if len(closed) > 1 else None
    if evidence is None or before is None or any(pod.created_at >= before for pod in evidence.pods):
        return evidence
    return None


def _replace_cause(history: JobHistory, attempt: Attempt, finding: Finding) -> JobHistory:
    """Replace the attempt's cause, and count the restart after it for the new cause."""
    assert attempt.cause is not None  # the caller has looked at it
    corrected = attempt.model_copy(
        update={"cause": finding.cause, "node": finding.node, "message": finding.message[:MESSAGE_LIMIT]}
    )
    attempts = tuple(corrected if known is attempt else known for known in history.attempts)
    if not history.is_running:
        return replace(history, attempts=attempts)
    restarts = move_restart(history.restarts, source=attempt.cause, target=finding.cause)
    return replace(history, attempts=attempts, restarts=restarts)


def _keep_known_cause(attempt: Attempt, finding: Finding) -> Finding:
    """Keep the cause that was found while there was evidence, now that there is none."""
    if finding.explained or attempt.cause is None:
        return finding
    return replace(finding, cause=attempt.cause, message=attempt.message or "", node=attempt.node)
