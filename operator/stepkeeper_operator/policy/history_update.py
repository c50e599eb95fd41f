"""Update the history of a job from what was observed.

Open an attempt for every start, and close it with a cause at every end.
"""

from dataclasses import replace

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Bookkeeping
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import (
    find_attempt_evidence,
    find_last_evidence,
    find_masked,
    is_of_start,
    runs_down,
)
from stepkeeper_operator.policy.attempts import (
    DELETED,
    SUSPENDED,
    close_as_requested,
    close_attempt,
    close_displaced,
    open_attempt,
    open_if_started,
    withdraw_attempt,
)
from stepkeeper_operator.policy.budgets import count_disruptions, reset_failures
from stepkeeper_operator.policy.causes.find_cause import find_cause
from stepkeeper_operator.policy.circumstances import gather_circumstances
from stepkeeper_operator.policy.corrections import correct_cause
from stepkeeper_operator.policy.history import Finding, JobHistory
from stepkeeper_operator.policy.machines import explain_loss
from stepkeeper_operator.policy.pod_ends import stopped_with_0, was_stopped
from stepkeeper_operator.policy.restarts_in_place import came_too_late, has_run_whole, record_restarts
from stepkeeper_operator.policy.starts import has_left_queue, note_limit, set_starts, was_edited

__all__ = ["update_history"]


def update_history(
    job: CheckpointedTrainingJob,
    observed: Observed,
    *,
    new_commit: bool,
    now: float,
    reattribution_s: int,
) -> JobHistory:
    """Update the history with everything that was observed. The observed JobSet is the job's own.

    Args:
        job: The job; its status holds the history so far.
        observed: The facts of this reconcile.
        new_commit: True if a commit was observed that is newer than the status knows.
        now: Unix time.
        reattribution_s: Seconds after its end in which an attempt's cause may still be corrected, though the next
            attempt runs.

    """
    history = _load_history(job, observed, new_commit=new_commit)
    history = correct_cause(history, job, observed, now=now, reattribution_s=reattribution_s)
    history = _follow_jobset(history, job, observed, now=now)
    history = note_limit(job, _record_report(history, observed))
    if new_commit:
        # Nobody can tell which of several unseen starts has made it.
        history = set_starts(history, min(1, history.bookkeeping.starts_without_checkpoint))
    return replace(history, restarts=count_disruptions(job.spec.restarts, history.restarts))


def _follow_jobset(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, *, now: float
) -> JobHistory:
    jobset, left = observed.jobset, has_left_queue(job, observed, now=now)
    if jobset is None and not (left and history.is_running):
        return close_as_requested(history, observed, DELETED, now=now)
    if jobset is None:
        return _close_suspended(history, job, observed, now=now)
    history = record_restarts(history, job, observed, jobset, now=now)
    if jobset.is_finished and not history.bookkeeping.started:
        history = open_attempt(history, observed, now=now)  # it began and ended unseen
    if not history.is_running:
        return open_if_started(history, observed, jobset, now=now)
    ended, stopped = _has_ended(history, job, observed, jobset), jobset.suspended or left
    if ended and came_too_late(history, job, observed, now=now):
        return withdraw_attempt(history)
    loss = explain_loss(job, observed, now=now)
    if stopped and (loss is not None or not runs_down(history, observed)):
        return _close_suspended(history, job, observed, now=now)
    return _close_with_cause(history, job, observed, jobset, now=now) if ended else history


def _close_suspended(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, *, now: float
) -> JobHistory:
    if came_too_late(history, job, observed, now=now):
        return withdraw_attempt(history)
    loss = None if job.spec.suspend else explain_loss(job, observed, now=now)
    if loss is not None:
        return close_displaced(history, observed, loss.cause, loss.message, now=now)
    eviction = observed.find_eviction(job)
    if eviction is not None and _came_to_nothing(history, job, observed):
        return withdraw_attempt(history)
    if eviction is not None:
        return close_displaced(history, observed, Cause.QUEUE_PREEMPTION, eviction, now=now)
    return close_as_requested(history, observed, SUSPENDED, now=now)


def _came_to_nothing(history: JobHistory, job: CheckpointedTrainingJob, observed: Observed) -> bool:
    """Tell whether an attempt that Kueue evicts has never run on all its hosts, for no fault of its own pods.

    Kueue spaces and limits such starts itself (waitForPodsReady). They say nothing about the training.
    """
    evidence = find_attempt_evidence(history, observed)
    pods = () if evidence is None else evidence.pods
    failed = any(pod.phase == "Failed" and not was_stopped(pod) for pod in pods)
    return not failed and not has_run_whole(history, job, observed)


def _record_report(history: JobHistory, observed: Observed) -> JobHistory:
    """Record the steps that the running attempt reported: where it resumed and how far it is."""
    last = observed.report
    if last is None or not history.is_running or last.ordinal != history.ordinal:
        return history
    attempt, report = history.attempts[-1], last.report
    if not is_of_start(last, attempt, history.bookkeeping):
        return history
    update = {
        "from_step": attempt.from_step if report.restored is None else report.restored.step,
        "to_step": attempt.to_step if report.step is None else report.step,
    }
    return replace(history, attempts=(*history.attempts[:-1], attempt.model_copy(update=update)))


def _load_history(job: CheckpointedTrainingJob, observed: Observed, *, new_commit: bool) -> JobHistory:
    status = job.status
    restarts = status.restarts
    if new_commit and job.spec.restarts.reset_on_new_checkpoint:
        restarts = reset_failures(restarts)
    bookkeeping = _find_number(status.bookkeeping, observed)
    history = JobHistory(attempts=status.attempts, restarts=restarts, bookkeeping=bookkeeping)
    # A person who suspends the job or changes its template has looked at it.
    looked_at = job.spec.suspend or was_edited(job, observed, status.bookkeeping)
    return set_starts(history, 0) if new_commit or looked_at else history


def _find_number(bookkeeping: Bookkeeping, observed: Observed) -> Bookkeeping:
    """Find the number of the present JobSet, and of those before it, also where the status was lost."""
    numbers = [evidence.ordinal[0] for evidence in observed.evidence]
    newest = max([*numbers, *([] if observed.jobset is None else [observed.jobset.number])], default=-1)
    if newest < bookkeeping.job_sets:
        return bookkeeping
    return Bookkeeping(job_sets=newest + 1, starts_without_checkpoint=bookkeeping.starts_without_checkpoint)


def _has_ended(history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet) -> bool:
    """Tell whether the attempt has ended.

    One failed pod ends it: its Job has no retries, and says so a second later. So does one that says that it failed
    and exited 0, of which no Job says anything. No pod does that a suspension stops: its Job doesn't count how it ends.
    """
    evidence = find_attempt_evidence(history, observed)
    if evidence is None or jobset.is_finished or evidence.failed_batch_jobs:
        return jobset.is_finished or evidence is not None
    stopping = jobset.suspend or jobset.suspended or job.spec.suspend
    failed = [pod for pod in evidence.pods if pod.phase == "Failed"]
    masked = find_masked(history, observed, job.spec.total_steps)
    return any(not (stopping and was_stopped(pod)) for pod in (*failed, *masked))


def _close_with_cause(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, *, now: float
) -> JobHistory:
    """Close the last attempt with the cause that the evidence gives."""
    evidence = find_attempt_evidence(history, observed)
    if jobset.completed:
        evidence = find_last_evidence(history, observed)
    if jobset.completed and not find_masked(history, observed, job.spec.total_steps):
        finding = _judge_completion(evidence, observed, jobset)
        if not finding.cause and evidence is not None and any(map(stopped_with_0, evidence.pods)):
            circumstances = gather_circumstances(job, observed, history.attempts[-1], evidence, now=now)
            finding = _describe_stop(find_cause(evidence, circumstances))
        return close_attempt(history, evidence, finding, now=now)
    counted = True if jobset.failure_reason is not None else None
    circumstances = gather_circumstances(
        job, observed, history.attempts[-1], evidence, counted=counted, now=now
    )
    return close_attempt(history, evidence, find_cause(evidence, circumstances), now=now)


def _describe_stop(finding: Finding) -> Finding:
    """Describe an end at which programs that were told to stop exited 0, as if they were done."""
    why = finding.message if finding.explained else "its pods were deleted"
    return replace(finding, message=f"every pod exited 0 after it was told to stop: {why}")


def _judge_completion(evidence: AttemptEvidence | None, observed: Observed, jobset: JobSet) -> Finding:
    """Judge an end at which every pod exited 0: complete, unless a notice made them stop."""
    ends = [pod.termination for pod in evidence.pods if pod.termination is not None] if evidence else []
    notices = [end.notice for end in ends if end.notice is not None]
    last = observed.report
    if last is not None and last.ordinal == jobset.ordinal and last.report.notice is not None:
        notices.append(last.report.notice)
    if not notices:
        return Finding(cause="", message="every pod exited 0")
    causes = [end.cause for end in ends if end.cause is not None]
    cause = causes[0] if causes else Cause.REQUESTED.value
    return Finding(cause=cause, message=f"every pod exited 0 after notice {notices[0]!r}")
