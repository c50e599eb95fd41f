"""Judge the newest ended attempt again while better evidence can arrive.

The survivors of a lost node fail long before the loss of the node is noticed.
"""

from dataclasses import replace

from stepkeeper.contract import JUDGED_KINDS, AttemptKind, Cause, Verdict
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.training_jobs.attempts.attempt_pods import AttemptPods, find_ended_pods, find_pods
from stepkeeper_operator.training_jobs.attempts.evidence import gather_evidence
from stepkeeper_operator.training_jobs.attempts.history import JobHistory, verdict_of
from stepkeeper_operator.training_jobs.attempts.machines import explain_loss
from stepkeeper_operator.training_jobs.attempts.verdict import attribute_to_loss, judge
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["correct_verdict"]


def correct_verdict(history: JobHistory, view: View) -> JobHistory:
    """Update the newest ended attempt's verdict, and its pods' decision whether to save, from the current evidence."""
    attempt = history.closed[-1] if history.closed else None
    if attempt is None:
        return history
    final = attempt.end is None or view.now - attempt.end >= view.settings.reattribution_s
    if final and history.is_running:
        return history
    pods = find_ended_pods(history, view.observed)
    if attempt.decision is None and (decision := pods.find_decision()) is not None:
        decided = attempt.model_copy(update={"decision": decision})
        history, attempt = history.put(attempt, decided), decided
    if final or not attempt.cause or attempt.kind not in {None, *JUDGED_KINDS}:
        return history
    verdict = _judge_again(history, attempt, pods, view)
    same_cause = (verdict.kind, verdict.cause) == (attempt.kind, attempt.cause)
    if same_cause and verdict.inferred == bool(attempt.inferred):
        return history
    return _move_to_earlier(attempt, pods.count_as_failure(), history.correct(attempt, verdict))


def _judge_again(history: JobHistory, attempt: Attempt, pods: AttemptPods, view: View) -> Verdict:
    """Judge by the present evidence, but keep the recorded verdict if the cause would only be inferred."""
    verdict = judge(replace(gather_evidence(view, attempt, pods), loss=None))
    if verdict.inferred:
        verdict = verdict_of(attempt)
    proven = verdict.cause == attempt.cause and not attempt.inferred
    if history.is_running and proven and verdict.kind == AttemptKind.UNRECOVERABLE:
        # A later edit of the fatal codes ends no attempt.
        verdict = replace(verdict, kind=attempt.kind or verdict.kind)
    # A loss of machines explains nothing once all pods were running on them again.
    fully_started = history.is_running and find_pods(history, view.observed).have_all_started(view.n_hosts)
    loss = None if fully_started else explain_loss(view)
    by_loss = attribute_to_loss(replace(verdict, inferred=False), loss)
    return verdict if by_loss.cause == verdict.cause else by_loss


def _move_to_earlier(attempt: Attempt, counted: bool | None, history: JobHistory) -> JobHistory:
    """Move an inferred verdict that turned out to be wrong to the earlier attempt that it fits.

    JobSet's counts show how many of the unobserved ends were failures, but not which: the verdicts were assigned by a
    guess. `counted` shows whether JobSet counted the end of `attempt` as a failure; None if that is still unknown.
    """
    failed = attempt.cause == Cause.APPLICATION_ERROR
    if not attempt.inferred or counted in {None, failed}:
        return history
    for earlier in reversed(history.closed[:-1]):
        if not earlier.inferred:
            break
        if (earlier.cause == Cause.APPLICATION_ERROR) is not failed:
            return history.correct(earlier, verdict_of(attempt))
    return history
