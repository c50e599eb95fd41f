"""Update the history of a job from what was observed.

Open an attempt for every start, and close it with a cause at every end.
"""

from dataclasses import replace

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, ConditionType
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import (
    counts_as_failure,
    find_attempt_evidence,
    find_new_pods,
    find_start,
    runs_down,
)
from stepkeeper_operator.policy.attempts import (
    DELETED,
    SUSPENDED,
    close_as_requested,
    close_attempt,
    close_displaced,
    open_attempt,
    was_suspended,
    withdraw_attempt,
)
from stepkeeper_operator.policy.budgets import count_disruptions, reset_failures
from stepkeeper_operator.policy.causes import Finding, find_cause
from stepkeeper_operator.policy.circumstances import gather_circumstances
from stepkeeper_operator.policy.corrections import correct_cause
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.machines import explain_loss
from stepkeeper_operator.policy.pod_ends import stopped_with_0, was_stopped
from stepkeeper_operator.policy.queueing import has_left_queue
from stepkeeper_operator.policy.starts import set_starts, was_edited

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
    history = _record_report(history, observed)
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
    history = _record_restarts(history, job, observed, jobset, now=now)
    if not history.is_running:
        return _open_if_started(history, observed, jobset, now=now)
    ended, stopped = _has_ended(history, job, observed, jobset), jobset.suspended or left
    if ended and _came_too_late(history, job, observed, now=now):
        return withdraw_attempt(history)
    loss = explain_loss(job, observed, now=now)
    if stopped and (loss is not None or not runs_down(history, observed)):
        return _close_suspended(history, job, observed, now=now)
    return _close_with_cause(history, job, observed, jobset, now=now) if ended else history


def _close_suspended(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, *, now: float
) -> JobHistory:
    if _came_too_late(history, job, observed, now=now):
        return withdraw_attempt(history)
    loss = None if job.spec.suspend else explain_loss(job, observed, now=now)
    if loss is not None:
        return close_displaced(history, observed, loss.cause, loss.message, now=now)
    eviction = observed.find_eviction(job)
    if eviction is not None:
        return close_displaced(history, observed, Cause.QUEUE_PREEMPTION, eviction, now=now)
    return close_as_requested(history, observed, SUSPENDED, now=now)


def _record_report(history: JobHistory, observed: Observed) -> JobHistory:
    """Record the steps that the running attempt reported: where it resumed and how far it is."""
    last = observed.report
    if last is None or not history.is_running or last.ordinal != history.ordinal:
        return history
    attempt, report = history.attempts[-1], last.report
    if last.received_at < attempt.start:
        return history  # it is of the attempt before a suspension
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
    history = JobHistory(attempts=status.attempts, restarts=restarts, bookkeeping=status.bookkeeping)
    # A person who suspends the job or changes its template has looked at it.
    looked_at = job.spec.suspend or was_edited(job, observed, status.bookkeeping)
    return set_starts(history, 0) if new_commit or looked_at else history


def _record_restarts(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, *, now: float
) -> JobHistory:
    """Open an attempt for every restart that JobSet did in place, also for those that no operator watched.

    JobSet makes no pods for a restart while it is suspended: its attempt begins when it is resumed.
    """
    started = observed.find_evidence(jobset.ordinal)
    held = (jobset.suspend or jobset.suspended) and (started is None or not started.pods)
    counted_left = _count_unseen_failures(history, observed, jobset)
    while history.bookkeeping.restarts_seen < jobset.restarts:
        if not history.bookkeeping.started:
            history = open_attempt(history, observed, now=now)
        counted = counts_as_failure(find_attempt_evidence(history, observed))
        if counted is None:
            last = history.last_attempt
            failed = last is not None and last.cause == Cause.APPLICATION_ERROR
            counted = counted_left > 0 if history.is_running else failed
            counted_left -= counted
        if history.is_running:
            history = _close_restarted(history, job, observed, jobset, counted=counted, now=now)
        if held and history.bookkeeping.restarts_seen + 1 == jobset.restarts:
            return history
        history = open_attempt(_see_restart(history), observed, now=now)
    # The cache may be behind what an earlier reconcile has asked the API server for.
    counted_seen = max(history.bookkeeping.counted_restarts_seen, jobset.restarts_counted)
    bookkeeping = history.bookkeeping.model_copy(update={"counted_restarts_seen": counted_seen})
    return replace(history, bookkeeping=bookkeeping)


def _close_restarted(
    history: JobHistory,
    job: CheckpointedTrainingJob,
    observed: Observed,
    jobset: JobSet,
    *,
    counted: bool,
    now: float,
) -> JobHistory:
    """Close the running attempt, which JobSet has restarted. One that came too late for its machines was none."""
    if _came_too_late(history, job, observed, now=now):
        return withdraw_attempt(history)
    evidence = find_attempt_evidence(history, observed)
    circumstances = gather_circumstances(
        job, observed, history.attempts[-1], evidence, counted=counted, rule=jobset.rule, now=now
    )
    end = find_start(_see_restart(history), observed, now=now)
    return close_attempt(history, evidence, find_cause(evidence, circumstances), now=end)


def _see_restart(history: JobHistory) -> JobHistory:
    seen = {"restarts_seen": history.bookkeeping.restarts_seen + 1, "resumed_at": None}
    return replace(history, bookkeeping=history.bookkeeping.model_copy(update=seen))


def _count_unseen_failures(history: JobHistory, observed: Observed, jobset: JobSet) -> int:
    """Count the restarts that JobSet counted as failures and whose ends nobody saw."""
    ordinals = [(jobset.number, n) for n in range(history.bookkeeping.restarts_seen + 1, jobset.restarts)]
    found = [observed.find_evidence(ordinal) for ordinal in ordinals]
    if history.bookkeeping.restarts_seen < jobset.restarts:
        found.append(find_attempt_evidence(history, observed))
    seen = sum(bool(counts_as_failure(evidence)) for evidence in found)
    return jobset.restarts_counted - history.bookkeeping.counted_restarts_seen - seen


def _has_ended(history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet) -> bool:
    """Tell whether the attempt has ended.

    One failed pod ends it: its Job has no retries, and says so a second later. No pod does that a suspension
    stops: its Job doesn't count how it ends.
    """
    evidence = find_attempt_evidence(history, observed)
    if evidence is None or jobset.is_finished or evidence.failed_batch_jobs:
        return jobset.is_finished or evidence is not None
    stopping = jobset.suspend or jobset.suspended or job.spec.suspend
    failed = [pod for pod in evidence.pods if pod.phase == "Failed"]
    return any(not (stopping and was_stopped(pod)) for pod in failed)


def _open_if_started(history: JobHistory, observed: Observed, jobset: JobSet, *, now: float) -> JobHistory:
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


def _came_too_late(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, *, now: float
) -> bool:
    """Tell whether the running attempt's machines are gone, and not all of its pods have ever run on them.

    JobSet may restart the pods before the loss is seen: the restart finds fewer machines than it needs.
    """
    attempt = history.attempts[-1]
    stepped = attempt.from_step is not None or attempt.to_step is not None
    if stepped or explain_loss(job, observed, now=now) is None:
        return False
    evidence = find_attempt_evidence(history, observed)
    if evidence is None or not evidence.pods:
        return not _has_run(job, attempt)
    return len({pod.rank for pod in evidence.pods if pod.started}) < job.spec.placement.n_hosts


def _has_run(job: CheckpointedTrainingJob, attempt: Attempt) -> bool:
    """Tell by the status whether all pods of the attempt have run: an operator that restarted has seen none of them."""
    running = next((c for c in job.status.conditions if c.type == ConditionType.RUNNING), None)
    if running is None:
        return False
    return running.status is ConditionStatus.TRUE or running.last_transition_time > attempt.start


def _close_with_cause(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, *, now: float
) -> JobHistory:
    """Close the last attempt with the cause that the evidence gives."""
    evidence = find_attempt_evidence(history, observed)
    if jobset.completed:
        finding = _judge_completion(evidence, observed, jobset)
        if not finding.cause and evidence is not None and any(map(stopped_with_0, evidence.pods)):
            circumstances = gather_circumstances(
                job, observed, history.attempts[-1], evidence, counted=None, rule=None, now=now
            )
            finding = _describe_stop(find_cause(evidence, circumstances))
        return close_attempt(history, evidence, finding, now=now)
    counted = True if jobset.failure_reason is not None else None
    circumstances = gather_circumstances(
        job, observed, history.attempts[-1], evidence, counted=counted, rule=None, now=now
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
