"""Correct the cause of an ended attempt while better evidence can come."""

from dataclasses import replace

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import (
    find_attempt_evidence,
    is_of_attempt,
    leave_out_replaced,
)
from stepkeeper_operator.policy.attempts import (
    MESSAGE_LIMIT,
    tell_decision,
    was_asked_for,
    was_suspended,
)
from stepkeeper_operator.policy.budgets import add_restarts, move_restart
from stepkeeper_operator.policy.causes.find_cause import attribute_to_loss, ended_unseen, find_cause
from stepkeeper_operator.policy.circumstances import gather_circumstances
from stepkeeper_operator.policy.history import Finding, JobHistory
from stepkeeper_operator.policy.machines import MachinesLoss, is_explained_by_machines

__all__ = ["correct_cause"]


def correct_cause(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, *, now: float, reattribution_s: int
) -> JobHistory:
    """Give ended attempts the causes that the evidence shows by now.

    The survivors of a lost node fail long before the node is seen to be lost. So the newest ended attempt is looked at
    again, and those before it of whose ends no watch had told.
    """
    # What is known of the newest depends on whether the end before it is a guess.
    history = _correct_newest(history, job, observed, now=now, reattribution_s=reattribution_s)
    history = _correct_unseen(history, job, observed, now=now, reattribution_s=reattribution_s)
    return _add_late_decision(history, observed, now=now, reattribution_s=reattribution_s)


def _correct_unseen(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, *, now: float, reattribution_s: int
) -> JobHistory:
    """Correct the attempts before the newest ended one that were judged by JobSet's counts alone.

    Those tell how many of several ends were failures, but not which.
    """
    # An attempt has no restart of its own after a suspension, nor a restart an attempt where its machines were gone.
    on_machines = job.spec.placement.queued_resource_name is not None
    if history.bookkeeping.resumed_at is not None or on_machines:
        return history
    n_open = 1 if history.is_running else 0
    number, restarts = history.ordinal
    for back in range(n_open + 2, len(history.attempts) + 1):
        attempt, restart = history.attempts[-back], restarts - back + 1
        late = attempt.end is None or now - attempt.end >= reattribution_s
        # Watches tell of ends in their order: before an end that they told of, there is none that they still have to
        # tell of. Nor is it certain there which attempt was which restart.
        if late or not ended_unseen(attempt.message):
            return history
        before = history.attempts[-back - 1] if back < len(history.attempts) else None
        evidence = _find_evidence_of_unseen((number, restart), before, observed)
        circumstances = gather_circumstances(job, observed, attempt, evidence, now=now)
        finding = find_cause(evidence, circumstances)
        if finding.explained:
            history = _replace_cause(history, attempt, finding)
    return history


def _find_evidence_of_unseen(
    ordinal: tuple[int, int], before: Attempt | None, observed: Observed
) -> AttemptEvidence | None:
    """Find the evidence of an attempt that a restart ended. One that was suspended before it has the same ordinal."""
    evidence = observed.find_evidence(ordinal)
    if evidence is None:
        return None
    # The end of one that a restart ended is a guess, too: nothing is left out by it.
    since = before.end if before is not None and was_suspended(before.message) else None
    return _keep_own(evidence, leave_out_replaced(evidence.pods, observed), since)


def _correct_newest(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, *, now: float, reattribution_s: int
) -> JobHistory:
    closed = history.attempts[:-1] if history.is_running else history.attempts
    if not closed:
        return history
    attempt = closed[-1]
    if attempt.end is None or was_asked_for(attempt.message) or not attempt.cause:
        return history
    if is_explained_by_machines(job, attempt.message):
        return history
    evidence = _find_evidence_of_ended(history, closed, observed)
    circumstances = gather_circumstances(job, observed, attempt, evidence, now=now)
    # Machines that were lost long after the end, or that all pods have run on since, explain nothing.
    late = now - attempt.end >= reattribution_s or _runs_whole(history, job, observed)
    loss = None if late else circumstances.loss
    by_pods = find_cause(evidence, replace(circumstances, loss=None))
    known = by_pods if by_pods.explained else _keep_known_cause(attempt, by_pods)
    finding = _attribute(known, loss)
    if now - attempt.end >= reattribution_s and (history.is_running or not _runs_down(evidence, observed)):
        return history if history.is_running else replace(history, finding=_settle(attempt, finding))
    # A guess that was right gets the words of the evidence, which may also say that no restart helps.
    guessed = finding.explained and ended_unseen(attempt.message)
    changed = guessed or finding.cause != attempt.cause
    if changed or not history.is_running:
        history = replace(history, finding=finding)
    return _replace_cause(history, attempt, finding) if changed else history


def _runs_down(evidence: AttemptEvidence | None, observed: Observed) -> bool:
    """Tell whether a pod of the ended attempt has not ended yet. What happens to dead pods' nodes proves nothing."""
    own = set() if evidence is None else {pod.uid for pod in evidence.pods}
    return any(pod.uid in own and not pod.terminal for pod in observed.pods)


def _settle(attempt: Attempt, finding: Finding) -> Finding:
    """Keep the attempt's cause for good."""
    if finding.cause == attempt.cause:
        return finding
    message = attempt.message or ""
    return Finding(cause=attempt.cause or "", message=message, node=attempt.node, explained=False)


def _runs_whole(history: JobHistory, job: CheckpointedTrainingJob, observed: Observed) -> bool:
    """Tell whether all pods of the next attempt have started."""
    evidence = find_attempt_evidence(history, observed) if history.is_running else None
    started = {pod.rank for pod in evidence.pods if pod.started} if evidence is not None else set()
    return len(started) >= observed.count_hosts(job)


def _find_evidence_of_ended(
    history: JobHistory, closed: tuple[Attempt, ...], observed: Observed
) -> AttemptEvidence | None:
    """Find the evidence of the newest ended attempt itself: another attempt's evidence proves nothing about it."""
    number, restarts = history.ordinal
    resumed_at = history.bookkeeping.resumed_at
    if not history.bookkeeping.started or (history.is_running and resumed_at is None and restarts == 0):
        # It was the last of an earlier JobSet, whose count of restarts isn't known any more.
        ordinal = max((e.ordinal for e in observed.evidence if e.ordinal[0] < number), default=None)
        evidence = None if ordinal is None else observed.find_evidence(ordinal)
    elif not history.is_running:
        return _find_until(closed[-1].end, find_attempt_evidence(history, observed))
    else:
        evidence = observed.find_evidence((number, restarts if resumed_at is not None else restarts - 1))
    # An end that nobody saw is a guess, and a restart followed it: nothing is left out by it.
    before = closed[-2] if len(closed) > 1 and not ended_unseen(closed[-2].message) else None
    since = None if before is None else before.end
    if evidence is None:
        return None
    present = find_attempt_evidence(history, observed)
    later = set() if present is None else {pod.uid for pod in present.pods}
    pods = evidence.pods if resumed_at is not None else leave_out_replaced(evidence.pods, observed)
    return _keep_own(evidence, [pod for pod in pods if pod.uid not in later], since)


def _keep_own(evidence: AttemptEvidence, pods: list[Pod], since: int | None) -> AttemptEvidence | None:
    """Keep those of the pods that are of the attempt. Without any its Jobs may be another attempt's."""
    own = tuple(pod for pod in pods if since is None or is_of_attempt(pod, since))
    return replace(evidence, pods=own) if own or not evidence.pods else None


def _find_until(end: float | None, evidence: AttemptEvidence | None) -> AttemptEvidence | None:
    """Leave out the pods that were made after the end: they were of an attempt that was withdrawn."""
    if evidence is None or end is None:
        return evidence
    return replace(evidence, pods=tuple(pod for pod in evidence.pods if pod.created_at <= end))


def _replace_cause(history: JobHistory, attempt: Attempt, finding: Finding) -> JobHistory:
    """Replace the attempt's cause, and count the restart after it for the new cause."""
    assert attempt.cause is not None  # the caller has looked at it
    corrected = attempt.model_copy(
        update={
            "cause": finding.cause or None,
            "node": finding.node,
            "message": finding.message[:MESSAGE_LIMIT],
        }
    )
    attempts = tuple(corrected if known is attempt else known for known in history.attempts)
    if attempts[-1] is corrected:
        return replace(history, attempts=attempts)
    if corrected.cause is None:
        restarts = add_restarts(history.restarts, attempt.cause, -1)
    else:
        restarts = move_restart(history.restarts, source=attempt.cause, target=corrected.cause)
    return replace(history, attempts=attempts, restarts=restarts)


def _keep_known_cause(attempt: Attempt, finding: Finding) -> Finding:
    """Keep the cause that was found while there was evidence, now that there is none."""
    assert attempt.cause is not None  # the caller has looked at it
    return replace(finding, cause=attempt.cause, message=attempt.message or "", node=attempt.node)


def _attribute(known: Finding, loss: MachinesLoss | None) -> Finding:
    """Attribute the end to the loss of its machines, if that explains it. A loss is evidence."""
    by_loss = attribute_to_loss(replace(known, explained=True), loss)
    return known if by_loss.cause == known.cause else by_loss


def _add_late_decision(
    history: JobHistory, observed: Observed, *, now: float, reattribution_s: int
) -> JobHistory:
    """Add what pods say since to the message of the newest end: they may still save when the first has ended."""
    closed = history.attempts[:-1] if history.is_running else history.attempts
    if not closed:
        return history
    attempt, said = closed[-1], closed[-1].message or ""
    if attempt.end is None or (history.is_running and now - attempt.end >= reattribution_s):
        return history
    message = tell_decision(said, _find_evidence_of_ended(history, closed, observed))
    if message == said:
        return history
    told = attempt.model_copy(update={"message": message[:MESSAGE_LIMIT]})
    return replace(history, attempts=tuple(told if known is attempt else known for known in history.attempts))
