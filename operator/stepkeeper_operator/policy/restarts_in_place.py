"""Record the restarts that JobSet did in place: each is an attempt, also those that no operator watched."""

from dataclasses import replace

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, ConditionType, find_condition
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import counts_as_failure, find_attempt_evidence, find_start
from stepkeeper_operator.policy.attempts import close_attempt, open_attempt, withdraw_attempt
from stepkeeper_operator.policy.causes.find_cause import find_cause
from stepkeeper_operator.policy.circumstances import gather_circumstances
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.machines import explain_loss

__all__ = ["came_too_late", "has_run_whole", "record_restarts"]


def record_restarts(
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
    if came_too_late(history, job, observed, now=now):
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


def came_too_late(
    history: JobHistory, job: CheckpointedTrainingJob, observed: Observed, *, now: float
) -> bool:
    """Tell whether the running attempt's machines are gone, and not all of its pods have ever run on them.

    JobSet may restart the pods before the loss is seen: the restart finds fewer machines than it needs.
    """
    return explain_loss(job, observed, now=now) is not None and not has_run_whole(history, job, observed)


def has_run_whole(history: JobHistory, job: CheckpointedTrainingJob, observed: Observed) -> bool:
    """Tell whether all pods of the running attempt have started, or it has made a step."""
    attempt = history.attempts[-1]
    if attempt.from_step is not None or attempt.to_step is not None:
        return True
    evidence = find_attempt_evidence(history, observed)
    if evidence is None or not evidence.pods:
        return _has_run(job, attempt)
    return len({pod.rank for pod in evidence.pods if pod.started}) >= observed.count_hosts(job)


def _has_run(job: CheckpointedTrainingJob, attempt: Attempt) -> bool:
    """Tell by the status whether all pods of the attempt have run: an operator that restarted has seen none of them."""
    running = find_condition(job.status.conditions, ConditionType.RUNNING)
    if running is None:
        return False
    return running.status is ConditionStatus.TRUE or running.last_transition_time > attempt.start
