"""Update the history of a job from the observed facts: an attempt for every start, a verdict for every end."""

from dataclasses import replace

from stepkeeper.contract import AttemptKind, Cause, Verdict
from stepkeeper_operator.api.v1alpha1.conditions import ConditionType, find_condition
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob_status import MAX_NOTICE, OperatorState
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.training_jobs.attempts.attempt_pods import (
    AttemptPods,
    find_current_report,
    find_pods,
)
from stepkeeper_operator.training_jobs.attempts.budgets import count_disruptions, reset_failures
from stepkeeper_operator.training_jobs.attempts.corrections import correct_verdict
from stepkeeper_operator.training_jobs.attempts.ends import (
    DELETED,
    SUSPENDED,
    close_as_judged,
    close_as_stopped,
    close_by,
    open_attempt,
    open_if_started,
    was_edited,
)
from stepkeeper_operator.training_jobs.attempts.evidence import gather_evidence
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.attempts.machines import explain_loss
from stepkeeper_operator.training_jobs.attempts.pod_ends import was_stopped
from stepkeeper_operator.training_jobs.attempts.restarts_in_place import (
    has_fully_started,
    lost_before_full_start,
    record_restarts,
)
from stepkeeper_operator.training_jobs.attempts.verdict import judge
from stepkeeper_operator.training_jobs.observed import Observed, View

__all__ = ["update_history"]


def update_history(view: View, *, new_commit: bool) -> JobHistory:
    """Update the history with all observed facts. The observed JobSet belongs to the job.

    `new_commit`: a commit was observed that is newer than those in the status.
    """
    # The report may be of the attempt that ends now, or of the one that begins now: record it before and after.
    history = _record_report(_load_history(view, new_commit=new_commit), view.observed)
    history = _follow_jobset(correct_verdict(history, view), view)
    history = _record_report(history, view.observed)
    if history.is_running and not history.is_attempt_of(view.job.status):
        # Note the limit when the attempt begins, so that a lower limit later does not end it.
        history = history.note(starts_allowed=view.job.spec.restarts.max_starts_without_checkpoint)
    if new_commit:
        # It is unknown which of several unobserved starts made the commit.
        n_starts = min(1, history.operator.starts_without_checkpoint)
        history = history.note(starts_without_checkpoint=n_starts)
    return replace(history, restarts=count_disruptions(view.job.spec.restarts, history.restarts))


def _load_history(view: View, *, new_commit: bool) -> JobHistory:
    status, restarts, known = view.job.status, view.job.status.restarts, view.job.status.operator
    if new_commit and view.job.spec.restarts.reset_on_new_checkpoint:
        restarts = reset_failures(restarts)
    operator, next_start_time = known, status.next_start_time
    numbers = [evidence.ordinal[0] for evidence in view.observed.evidence]
    newest = max([*numbers, -1 if view.jobset is None else view.jobset.number])
    if newest >= known.job_sets:
        # The status was lost, or is older than this JobSet.
        n_starts = known.starts_without_checkpoint
        operator = OperatorState(job_sets=newest + 1, starts_without_checkpoint=n_starts)
        next_start_time = None
    history = JobHistory(
        attempts=status.attempts, restarts=restarts, operator=operator, next_start_time=next_start_time
    )
    # A user who suspends the job or changes its template may have fixed it.
    changed = view.job.spec.suspend or was_edited(view, known)
    return history.note(starts_without_checkpoint=0) if new_commit or changed else history


def _record_report(history: JobHistory, observed: Observed) -> JobHistory:
    """Record the running attempt's reports: where it resumed, its step, and its notice to stop."""
    last = find_current_report(observed, history) if history.is_running else None
    if last is None:
        return history
    attempt, report = history.attempts[-1], last.report
    update = {
        "from_step": attempt.from_step if report.restored is None else report.restored.step,
        "to_step": attempt.to_step if report.step is None else report.step,
        "notice": attempt.notice if report.notice is None else report.notice[:MAX_NOTICE],
    }
    return history.put(attempt, attempt.model_copy(update=update))


def _follow_jobset(history: JobHistory, view: View) -> JobHistory:
    """Open and close attempts as the JobSet and its pods show their starts and ends."""
    jobset, left_queue = view.jobset, _has_left_queue(view)
    if jobset is None:
        if left_queue and history.is_running:
            return _close_suspended(history, view)
        return close_as_stopped(history, view, AttemptKind.STOPPED, DELETED)
    history = record_restarts(history, view, jobset)
    if jobset.is_finished and not history.operator.started:
        history = open_attempt(history, view)  # it began and ended unobserved
    if not history.is_running:
        return open_if_started(history, view, jobset)
    ended = _has_ended(history, view, jobset)
    if ended and lost_before_full_start(history, view):
        return history.withdraw()
    if jobset.suspended or left_queue:
        # Pods on lost machines may never end.
        has_running_pods = find_pods(history, view.observed).has_running_pods(view.observed)
        if not has_running_pods or explain_loss(view) is not None:
            return _close_suspended(history, view)
    return _close_ended(history, view, jobset) if ended else history


def _has_left_queue(view: View) -> bool:
    """Return True if a queued job's JobSet is gone, or is being deleted, because the job has to stop."""
    if view.jobset is None:
        # The status shows whether Kueue managed the last JobSet.
        quota = find_condition(view.job.status.conditions, ConditionType.QUOTA_RESERVED)
        queued = quota is not None and quota.reason != Reason.NOT_QUEUED
    else:
        queued = view.observed.is_queued and view.jobset.deleting
    return queued and (view.job.spec.suspend or explain_loss(view) is not None)


def _close_suspended(history: JobHistory, view: View) -> JobHistory:
    """Close the running attempt as suspended: by its user, for a loss of its machines, or by Kueue."""
    if lost_before_full_start(history, view):
        return history.withdraw()
    loss = None if view.job.spec.suspend else explain_loss(view)
    eviction = view.observed.find_eviction(view.job)
    if loss is not None:
        cause, message = loss.cause, f"{SUSPENDED}: {loss.message}"
    elif eviction is not None:
        # Kueue itself spaces and limits starts that never run all pods (waitForPodsReady).
        pods = find_pods(history, view.observed)
        if not pods.have_failed() and not has_fully_started(history, view):
            return history.withdraw()
        cause, message = Cause.QUEUE_PREEMPTION, f"{SUSPENDED}: {eviction}"
    else:
        cause, message = Cause.REQUESTED, SUSPENDED
    return close_as_stopped(history, view, AttemptKind.SUSPENDED, message, cause=cause)


def _has_ended(history: JobHistory, view: View, jobset: JobSet) -> bool:
    """Return True if the attempt has ended.

    One failed pod ends it: its Job has no retries, and reports the failure a second later. So does a pod that exited 0
    but reported a failure, which no Job notices. A pod stopped by a suspension does not: its Job ignores how it ended.
    """
    pods = find_pods(history, view.observed)
    if jobset.is_finished or pods.failed_batch_jobs:
        return True
    stopping = jobset.suspend or jobset.suspended or view.job.spec.suspend
    failed = [pod for pod in pods.pods if pod.phase == "Failed"]
    hidden = pods.list_hidden_exits(view.job.spec.total_steps)
    return any(not (stopping and was_stopped(pod)) for pod in (*failed, *hidden))


def _close_ended(history: JobHistory, view: View, jobset: JobSet) -> JobHistory:
    """Close the last attempt with the verdict on its evidence."""
    pods = find_pods(history, view.observed)
    if not jobset.completed or pods.list_hidden_exits(view.job.spec.total_steps):
        return close_as_judged(history, view, counted=True if jobset.failure_reason is not None else None)
    pods = replace(pods, pods=pods.present)  # the failures of replaced pods did not end it
    verdict = _judge_completion(history, view, pods, jobset)
    return close_by(verdict, history, pods, now=view.now)


def _judge_completion(history: JobHistory, view: View, pods: AttemptPods, jobset: JobSet) -> Verdict:
    """Judge an end where every pod exited 0: complete, unless the pods were asked to stop."""
    verdict = judge(gather_evidence(view, history.attempts[-1], pods))
    if verdict.kind == AttemptKind.COMPLETED:
        return verdict
    messages = [pod.termination for pod in pods.pods if pod.termination is not None]
    notices = [message.notice for message in messages if message.notice is not None]
    last = view.observed.report
    if last is not None and last.ordinal == jobset.ordinal and last.report.notice is not None:
        notices.append(last.report.notice)
    if notices:
        causes = [message.cause for message in messages if message.cause is not None]
        cause = causes[0] if causes else Cause.REQUESTED.value
        text = f"every pod exited 0 after notice {notices[0]!r}"
        return Verdict(kind=AttemptKind.of(cause), cause=cause, message=text)
    if not pods.present or not pods.stopped_with_0():
        return Verdict(kind=AttemptKind.COMPLETED, cause=None, message="every pod exited 0")
    why = "its pods were deleted" if verdict.inferred else verdict.message
    return replace(verdict, message=f"every pod exited 0 after it was asked to stop: {why}")
