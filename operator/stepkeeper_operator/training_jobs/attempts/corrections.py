"""Judge the newest ended attempt again while better evidence can come.

The survivors of a lost node fail long before the node is seen to be lost.
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
    """Give the newest ended attempt the verdict that the evidence shows by now, and what its pods chose to save."""
    attempt = history.closed[-1] if history.closed else None
    late = attempt is None or attempt.end is None or view.now - attempt.end >= view.settings.reattribution_s
    if attempt is None or (late and history.is_running):
        return history
    pods = find_ended_pods(history, view.observed)
    if attempt.decision is None and (decision := pods.find_decision()) is not None:
        decided = attempt.model_copy(update={"decision": decision})
        history, attempt = history.put(attempt, decided), decided
    if late or not attempt.cause or attempt.kind not in {None, *JUDGED_KINDS}:
        return history
    verdict = _judge_again(history, attempt, pods, view)
    if (verdict.kind, verdict.cause, verdict.inferred) == (
        attempt.kind,
        attempt.cause,
        bool(attempt.inferred),
    ):
        return history
    return _pass_on(attempt, pods.count_as_failure(), history.correct(attempt, verdict))


def _judge_again(history: JobHistory, attempt: Attempt, pods: AttemptPods, view: View) -> Verdict:
    verdict = judge(replace(gather_evidence(view, attempt, pods), loss=None))
    if verdict.inferred:
        verdict = verdict_of(attempt)
    known = verdict.cause == attempt.cause and not attempt.inferred
    if history.is_running and known and verdict.kind == AttemptKind.UNRECOVERABLE:
        verdict = replace(verdict, kind=attempt.kind or verdict.kind)  # fatal codes edited since end nothing
    # Machines that were lost when all pods ran already on them again explain nothing.
    run_whole = history.is_running and find_pods(history, view.observed).have_all_started(view.n_hosts)
    loss = None if run_whole else explain_loss(view)
    by_loss = attribute_to_loss(replace(verdict, inferred=False), loss)
    return verdict if by_loss.cause == verdict.cause else by_loss


def _pass_on(attempt: Attempt, counted: bool | None, history: JobHistory) -> JobHistory:
    """Pass an inferred verdict that turned out to be wrong on to the attempt before that it is right for.

    JobSet's counts tell how many of several ends that were not seen were failures, but not which.
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
