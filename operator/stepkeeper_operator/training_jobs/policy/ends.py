"""Plan what follows the end of an attempt: the end of the job, a wait, or the next JobSet.

An end is recorded once the status has its cause and the attempt after it. The limits of restarts are not applied to a
recorded end again, so a later edit of the limits ends no attempt that was allowed to start.
"""

from dataclasses import replace
from typing import Final

from stepkeeper.contract import FENCED, STOPPED_KINDS, AttemptKind, Cause
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_pods
from stepkeeper_operator.training_jobs.attempts.budgets import explain_exhausted_budget
from stepkeeper_operator.training_jobs.attempts.history import JobHistory, describe_end
from stepkeeper_operator.training_jobs.decision import DeleteJobSet, JobEnd
from stepkeeper_operator.training_jobs.observed import View
from stepkeeper_operator.training_jobs.policy.plan import BACKING_OFF, Plan, set_backoff

__all__ = [
    "find_completion",
    "has_unrecorded_end",
    "judge_last_end",
    "must_be_replaced",
    "plan_after_completion",
    "plan_after_failure",
]

_AFTER_FIX: Final = "Fix the cause, then delete and create this job again: it resumes from the latest commit"


def find_completion(history: JobHistory) -> JobEnd | None:
    """Return the end of the job if an attempt ended without a cause, because the training is done."""
    ended = (each for each in history.closed if each.end is not None and each.cause is None)
    done = next((each for each in ended if each.kind in {None, AttemptKind.COMPLETED}), None)
    if done is None:
        return None
    return JobEnd(complete=True, reason=Reason.TRAINING_DONE, message=describe_end(done))


def judge_last_end(job: CheckpointedTrainingJob, history: JobHistory, *, restarted: bool) -> JobEnd | None:
    """Return the end of the job if no restart is allowed after its newest ended attempt.

    `restarted`: a later attempt runs already, since JobSet restarts by itself.
    """
    attempt = history.closed[-1] if history.closed else None
    if attempt is None or not attempt.cause:
        return None
    message = describe_end(attempt)
    if attempt.cause == FENCED:
        advice = (
            "This job has written nothing since. End the other job, or give one of them another checkpoint.uri, "
            "then delete and create this job again"
        )
        return JobEnd(complete=False, reason=Reason.ROOT_OWNED_BY_ANOTHER, message=f"{message}. {advice}")
    if attempt.kind == AttemptKind.UNRECOVERABLE:
        text = f"{message}. spec.restarts.fatalExitCodes lists that code. {_AFTER_FIX}"
        return JobEnd(complete=False, reason=Reason.FATAL_EXIT_CODE, message=text)
    if restarted and _is_recorded(job, history, attempt):
        return None
    why = explain_exhausted_budget(job.spec.restarts, history.restarts, attempt.cause, restarted=restarted)
    if why is None:
        return None
    failed = attempt.cause == Cause.APPLICATION_ERROR
    reason = Reason.MAX_FAILURES_REACHED if failed else Reason.MAX_DISRUPTIONS_REACHED
    return JobEnd(complete=False, reason=reason, message=f"{why}. The last end: {message}. {_AFTER_FIX}")


def has_unrecorded_end(job: CheckpointedTrainingJob, history: JobHistory) -> bool:
    """Return True unless the end before the running attempt is recorded as it is judged now."""
    ended = history.closed[-1] if history.closed else None
    if ended is None or not _is_recorded(job, history, ended):
        return True
    return all((each.number, each.inferred) != (ended.number, ended.inferred) for each in job.status.attempts)


def _is_recorded(job: CheckpointedTrainingJob, history: JobHistory, ended: Attempt) -> bool:
    """Return True if the status has the running attempt, and `ended` with its present cause."""
    running, recorded = history.last_attempt, job.status.attempts
    if running is None or not recorded or recorded[-1].number != running.number:
        return False
    return any((each.number, each.cause) == (ended.number, ended.cause) for each in recorded)


def must_be_replaced(view: View, jobset: JobSet, history: JobHistory) -> bool:
    """Return True if pods with hidden exit codes ended the attempt: they exited 0, so JobSet does not restart them."""
    last = history.last_attempt
    if last is None or last.end is None or last.kind in STOPPED_KINDS:
        return False
    pods = find_pods(history, view.observed)
    # Unless its pods are complete, JobSet acts by itself on a failed one.
    jobset_acts = not jobset.completed and any(pod.phase == "Failed" for pod in pods.present)
    return not jobset_acts and bool(pods.list_hidden_exits(view.job.spec.total_steps))


def plan_after_completion(view: View, jobset: JobSet, plan: Plan) -> Plan:
    """Plan what follows when every pod has exited 0: the end of the job, unless the pods were asked to stop."""
    last, total = plan.history.last_attempt, view.job.spec.total_steps
    if last is not None and last.cause is not None:
        n_left = None if last.to_step is None or total is None else total - last.to_step
        # If the remaining steps are unknown, the pods' exit codes have to show whether the training is done.
        stopped = find_pods(plan.history, view.observed).stopped_with_0() if n_left is None else n_left > 0
        if stopped:
            where = "" if n_left is None else f" at step {last.to_step} of {total}"
            waiting = f"all pods exited 0{where} after a notice; the job is restarted"
            return replace(plan, actions=(DeleteJobSet(jobset=jobset),), waiting=waiting)
    end = JobEnd(complete=True, reason=Reason.ALL_PODS_SUCCEEDED, message="every pod exited 0")
    return replace(plan, end=end)


def plan_after_failure(view: View, jobset: JobSet, plan: Plan) -> Plan:
    """Plan what follows a failed JobSet: the end of the job, a wait, or the next JobSet.

    A JobSet with running pods is deleted before the wait, so that they stop.
    """
    last = plan.history.last_attempt
    if end := judge_last_end(view.job, plan.history, restarted=False):
        ended_at = 0 if last is None or last.end is None else last.end
        left_s = ended_at + view.settings.reattribution_s - view.now
        if left_s > 0 and _is_provisional(view, plan.history):
            return replace(plan, waiting="the cause of the last end may still change", look_again_s=left_s)
        return replace(plan, end=end)
    history, wait_s = set_backoff(view, plan.history)
    if wait_s > 0 and jobset.is_finished:
        return replace(plan, history=history, waiting=BACKING_OFF, look_again_s=wait_s)
    actions = (DeleteJobSet(jobset=jobset),)
    return replace(plan, history=history, actions=actions, waiting="its JobSet is being replaced")


def _is_provisional(view: View, history: JobHistory) -> bool:
    """Return True if the cause of the last end may still be corrected, so that the job must not end yet.

    The loss of machines is noticed after the survivors have failed. It may be the cause of a failure if the job names a
    QueuedResource, or if a pod has not ended: then that pod's node may be lost.
    """
    last = history.last_attempt
    if last is None or last.kind == AttemptKind.UNRECOVERABLE:
        return False
    may_be_loss = view.is_on_queued_resource or find_pods(history, view.observed).has_running_pods(
        view.observed
    )
    return bool(last.inferred) or (last.kind == AttemptKind.FAILED and may_be_loss)
