"""Plan what happens to the JobSet next: make, keep, suspend or replace it, or end the job."""

from dataclasses import dataclass, replace
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, JobSetRef
from stepkeeper_operator.build import build_jobset, machines_hash, queue_labels, template_hash
from stepkeeper_operator.decision import Action, CreateJobSet, DeleteJobSet, JobEnd, SetSuspend
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import JOBSET_RECHECK_S, REJECTED_AGAIN_S, Leftover, Observed
from stepkeeper_operator.policy.attempt_evidence import counts_as_failure, find_attempt_evidence
from stepkeeper_operator.policy.attempts import EDITED, NOT_ALLOWED, close_as_requested
from stepkeeper_operator.policy.budgets import count_failures, explain_exhausted_budget
from stepkeeper_operator.policy.causes import CAUSE_FENCED, Verdict
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.lost_pods import ORPHAN_WAIT_S
from stepkeeper_operator.policy.machines import find_wait
from stepkeeper_operator.policy.pod_ends import stopped_with_0, tells_own_limits
from stepkeeper_operator.policy.queueing import leaves_queue, should_suspend
from stepkeeper_operator.policy.starts import compute_next_start, compute_report_wait_s
from stepkeeper_operator.settings import OperatorSettings

__all__ = ["Plan", "plan_next", "stop_jobset"]

_REQUEUED: Final = "its labels kueue.x-k8s.io/* were changed, so its JobSet is made anew"
_LEFT_QUEUE: Final = "it is suspended, and leaves the queue that Kueue admits it from"
_HELD: Final = "the job is not accepted: condition Accepted says why"
_REFUSED: Final = "the API server refuses its JobSet: condition Accepted says why"
_BACKING_OFF: Final = "it waits until status.bookkeeping.notBefore (spec.restarts.backoff)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The part of a decision that is about the JobSet."""

    history: JobHistory
    job_set: JobSetRef | None
    """Value for status.resources."""

    actions: tuple[Action, ...] = ()
    end: JobEnd | None = None
    waiting: str | None = None
    """The reason why a job without a running attempt waits, for people."""

    look_again_s: float | None = None


def plan_next(
    job: CheckpointedTrainingJob,
    observed: Observed,
    history: JobHistory,
    *,
    settings: OperatorSettings,
    now: float,
) -> Plan:
    """Plan the next step from this history. The observed JobSet is the job's own."""
    jobset = observed.jobset
    if jobset is None:
        return _plan_without_jobset(job, observed, history, settings=settings, now=now)
    plan = Plan(history=history, job_set=JobSetRef(name=jobset.name, uid=jobset.uid))
    if jobset.deleting:
        return replace(plan, waiting="the old JobSet's pods are still stopping")
    if jobset.completed:  # before any edit: what is done isn't done again with another template
        return _plan_after_completion(job, observed, jobset, plan)
    if change := _find_change(job, jobset, observed, history):
        closed = close_as_requested(history, observed, change, now=now)
        return replace(plan, history=closed, actions=(DeleteJobSet(jobset=jobset),), waiting=change)
    if jobset.failure_reason is not None:
        return _plan_after_failure(job, observed, jobset, plan, settings=settings, now=now)
    return _plan_while_alive(job, observed, jobset, plan, now=now)


def stop_jobset(jobset: JobSet | None, *, queued: bool) -> tuple[Action, ...]:
    """Stop all pods after the job's end. The pods of a JobSet that ended by itself are kept for their logs.

    One that Kueue manages is not suspended first: Kueue would resume it.
    """
    if jobset is None or jobset.is_finished or jobset.deleting:
        return ()
    return (
        (DeleteJobSet(jobset=jobset),) if jobset.suspended or queued else _set_suspend(jobset, suspend=True)
    )


def _plan_without_jobset(
    job: CheckpointedTrainingJob,
    observed: Observed,
    history: JobHistory,
    *,
    settings: OperatorSettings,
    now: float,
) -> Plan:
    if end := _judge_last_end(job, history, restarted=False):
        return Plan(history=history, job_set=None, end=end)
    if _number_was_used(job, observed, history):
        # Reserve the JobSet's number in the status before it is made: no second JobSet may get it.
        used = history.bookkeeping.model_copy(
            update={
                "job_sets": history.bookkeeping.job_sets + 1,
                "started": False,
                "restarts_seen": 0,
                "resumed_at": None,
                "counted_restarts_seen": 0,
            }
        )
        history = replace(history, bookkeeping=used)
    history, wait_s = _set_backoff(job, observed, history, now)
    plan = Plan(history=history, job_set=None)
    delay = _find_delay(job, observed, history, wait_s=wait_s, now=now)
    if delay is not None:
        return replace(plan, waiting=delay[0], look_again_s=delay[1])
    manifest = build_jobset(
        job,
        number=history.bookkeeping.job_sets - 1,
        failures_left=_count_failures_left(job, history),
        unreachable_s=settings.unreachable_toleration_s,
        machines=observed.machines,
    )
    return replace(plan, actions=(CreateJobSet(manifest=manifest),), waiting="its JobSet is being made")


def _find_delay(
    job: CheckpointedTrainingJob, observed: Observed, history: JobHistory, *, wait_s: float, now: float
) -> tuple[str, float | None] | None:
    """Find what the next JobSet waits for. Also return in how many seconds to look again."""
    if should_suspend(job, observed, history, now=now) or observed.held:
        return _HELD if observed.held else "it is suspended", None
    if wait := find_wait(job, observed):
        return wait.message, None
    if wait_s > 0:
        return _BACKING_OFF, wait_s
    if (refusal := observed.rejection) is not None and now < refusal.at + REJECTED_AGAIN_S:
        return _REFUSED, refusal.at + REJECTED_AGAIN_S - now
    if observed.leftover is not None:
        # Two sets of pods at once would fight for the storage, and two Jobs can't have one name.
        return _describe_leftover(observed.leftover), JOBSET_RECHECK_S
    return None


def _describe_leftover(leftover: Leftover) -> str:
    if leftover.orphans:
        return (
            f"{leftover.name} of an earlier JobSet is still there, though its Job is gone: it is deleted if nobody "
            f"else does it within {ORPHAN_WAIT_S} s"
        )
    return f"{leftover.name} of {leftover.origin} is still there: it has to end, or to be deleted"


def _number_was_used(job: CheckpointedTrainingJob, observed: Observed, history: JobHistory) -> bool:
    """Return True if a JobSet was made with the last reserved number.

    The status doesn't name one that was gone again before the operator looked. Its pods tell.
    """
    resources, last = job.status.resources, history.bookkeeping.job_sets - 1
    if history.bookkeeping.job_sets == 0 or (resources is not None and resources.job_set is not None):
        return True
    return any(evidence.ordinal[0] == last for evidence in observed.evidence)


def _count_failures_left(job: CheckpointedTrainingJob, history: JobHistory) -> int:
    counted = count_failures(history.restarts)
    last = history.last_attempt
    if last is not None and last.cause == Cause.APPLICATION_ERROR:
        counted += 1  # this JobSet is itself a restart
    return max(0, job.spec.restarts.max_failures - counted)


def _plan_after_completion(
    job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, plan: Plan
) -> Plan:
    last = plan.history.last_attempt
    step = None if last is None else last.to_step
    total = job.spec.total_steps
    if last is not None and last.cause is not None:
        known = step is not None and total is not None
        if (step < total) if step is not None and total is not None else _was_stopped(plan.history, observed):
            where = f" at step {step} of {total}" if known else ""
            waiting = f"all pods exited 0{where} after a notice; it is started again"
            return replace(plan, actions=(DeleteJobSet(jobset=jobset),), waiting=waiting)
    return replace(plan, end=JobEnd(complete=True, reason="AllPodsSucceeded", message="every pod exited 0"))


def _was_stopped(history: JobHistory, observed: Observed) -> bool:
    """Tell whether a program exited 0 because it was told to stop. Nobody knows then how far it was."""
    evidence = find_attempt_evidence(history, observed)
    return evidence is not None and any(map(stopped_with_0, evidence.pods))


def _plan_after_failure(
    job: CheckpointedTrainingJob,
    observed: Observed,
    jobset: JobSet,
    plan: Plan,
    *,
    settings: OperatorSettings,
    now: float,
) -> Plan:
    history = plan.history
    last = history.last_attempt
    if end := _judge_last_end(job, history, restarted=False):
        open_s = (0 if last is None or last.end is None else last.end) + settings.reattribution_s - now
        if open_s > 0 and _is_provisional(job, history):
            return replace(plan, waiting="the cause of its end is not known yet", look_again_s=open_s)
        return replace(plan, end=end)
    history, wait_s = _set_backoff(job, observed, history, now)
    if wait_s > 0:
        return replace(plan, history=history, waiting=_BACKING_OFF, look_again_s=wait_s)
    return replace(
        plan, history=history, actions=(DeleteJobSet(jobset=jobset),), waiting="its JobSet is being replaced"
    )


def _is_provisional(job: CheckpointedTrainingJob, history: JobHistory) -> bool:
    """Tell whether the cause of the last end can still turn out to be another, so that nothing final may follow.

    Survivors fail before the machines of their peers are seen to be gone.
    """
    finding = history.finding
    if finding is None or finding.verdict is not Verdict.RESTART:
        return False
    on_machines = job.spec.placement.queued_resource_name is not None
    by_loss = (
        on_machines and finding.cause == Cause.APPLICATION_ERROR and not tells_own_limits(finding.message)
    )
    return not finding.explained or by_loss


def _plan_while_alive(
    job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, plan: Plan, *, now: float
) -> Plan:
    history = plan.history
    # JobSet acts first on an attempt that has just ended, unless no restart of it can be right.
    final = history.finding is not None and history.finding.verdict is not Verdict.RESTART
    to_judge = _has_unrecorded_end(job, history) if history.is_running else final
    if to_judge and (end := _judge_last_end(job, history, restarted=history.is_running)):
        return replace(plan, end=end, history=close_as_requested(history, observed, NOT_ALLOWED, now=now))
    plan = replace(plan, look_again_s=compute_report_wait_s(job, observed, history, now=now))
    wait = find_wait(job, observed)
    # Hosts that left for a moment stop nothing that runs, but nothing starts without them.
    waits = wait is not None and (wait.stop or jobset.suspend)
    if observed.is_queued:
        left = leaves_queue(job, observed, history, now=now)
        plan = replace(plan, actions=(DeleteJobSet(jobset=jobset),), waiting=_LEFT_QUEUE) if left else plan
    else:
        plan = _hold_next_start(job, observed, plan, now=now)
        stops = should_suspend(job, observed, plan.history, now=now)
        wanted = waits or stops or plan.waiting is not None
        # A back-off only spaces the restarts of what goes on, also of a job that isn't accepted.
        resumes = not observed.held or plan.history.bookkeeping.not_before is not None
        if wanted or resumes:
            plan = replace(plan, actions=_set_suspend(jobset, suspend=wanted))
    return replace(plan, waiting=wait.message) if waits and wait is not None else plan


def _hold_next_start(job: CheckpointedTrainingJob, observed: Observed, plan: Plan, *, now: float) -> Plan:
    """Hold up the restart that JobSet is about to do, if the job's starts come to nothing at once.

    JobSet restarts in place without any wait, and without any limit unless it counts a failure: those are few.
    """
    last = plan.history.last_attempt
    if last is None or last.end is None or _counts_towards_max(observed, plan.history, last):
        return plan
    history, wait_s = _set_backoff(job, observed, plan.history, now)
    plan = replace(plan, history=history)
    return replace(plan, waiting=_BACKING_OFF, look_again_s=wait_s) if wait_s > 0 else plan


def _counts_towards_max(observed: Observed, history: JobHistory, last: Attempt) -> bool:
    """Tell whether JobSet has counted the restart after the last attempt, or will.

    It may not have counted what is charged to the application: a pod that saved because its peer failed hides that.
    """
    jobset, known = observed.jobset, history.bookkeeping
    if last.cause != Cause.APPLICATION_ERROR:
        return False
    if jobset is not None and jobset.restarts > known.restarts_seen:
        return jobset.restarts_counted > known.counted_restarts_seen
    return counts_as_failure(find_attempt_evidence(history, observed)) is not False


def _find_change(
    job: CheckpointedTrainingJob, jobset: JobSet, observed: Observed, history: JobHistory
) -> str | None:
    """Find out what was changed since the JobSet was made, so that another one has to take its place."""
    if observed.held:
        return None
    if _is_outdated(job, jobset, observed):
        return EDITED
    # Kueue takes no other queue for what runs.
    idle = jobset.suspended and not history.is_running
    return _REQUEUED if idle and jobset.lacks_labels(queue_labels(job)) else None


def _is_outdated(job: CheckpointedTrainingJob, jobset: JobSet, observed: Observed) -> bool:
    """Tell whether the JobSet was built from another template, or for other machines than it could be resumed on.

    Without its machines nobody can tell yet. What runs goes on, whatever is learnt of them meanwhile.
    """
    machines = observed.machines
    if job.spec.placement.queued_resource_name is not None and machines is None:
        return False
    if jobset.template_hash != template_hash(job, machines):
        return True
    if machines is None or not (machines.ready and jobset.suspended):
        return False
    return jobset.machines_hash != machines_hash(machines)


def _has_unrecorded_end(job: CheckpointedTrainingJob, history: JobHistory) -> bool:
    """Return True if the status lacks the running attempt, or the cause of the end before it.

    A judgement is final: an edit of the budgets ends no attempt that was allowed to start.
    """
    ended, known = _find_newest_ended(history), job.status.attempts
    if (
        ended is None
        or history.last_attempt is None
        or not known
        or known[-1].number != history.last_attempt.number
    ):
        return True
    return all((entry.number, entry.cause) != (ended.number, ended.cause) for entry in known)


def _judge_last_end(job: CheckpointedTrainingJob, history: JobHistory, *, restarted: bool) -> JobEnd | None:
    """Return the end of the job if its newest ended attempt leaves no restart."""
    attempt = _find_newest_ended(history)
    if attempt is None or not attempt.cause:
        return None
    said = attempt.message or ""
    if attempt.cause == CAUSE_FENCED:
        message = (
            f"{said}. Nothing was written since. End the other job, or give one of them a checkpoint.uri of its own, "
            "then delete and create this job again"
        )
        return JobEnd(complete=False, reason="RootOwnedByAnother", message=message)
    if history.finding is not None and history.finding.verdict is Verdict.FATAL:
        return JobEnd(complete=False, reason="FatalExitCode", message=said)
    why = explain_exhausted_budget(job.spec.restarts, history.restarts, attempt.cause, restarted=restarted)
    if why is None:
        return None
    reason = "MaxFailuresReached" if attempt.cause == Cause.APPLICATION_ERROR else "MaxDisruptionsReached"
    return JobEnd(complete=False, reason=reason, message=f"{why}. The last time: {said}")


def _find_newest_ended(history: JobHistory) -> Attempt | None:
    return next((attempt for attempt in reversed(history.attempts) if attempt.end is not None), None)


def _set_backoff(
    job: CheckpointedTrainingJob, observed: Observed, history: JobHistory, now: float
) -> tuple[JobHistory, float]:
    """Set the time of the next start in the history. Also return the seconds until then."""
    last = history.last_attempt
    if last is None or last.end is None or not last.cause:
        return history, 0.0
    not_before = compute_next_start(job, observed, history)
    noted = replace(history, bookkeeping=history.bookkeeping.model_copy(update={"not_before": not_before}))
    return noted, 0.0 if not_before is None else max(0.0, not_before - now)


def _set_suspend(jobset: JobSet, *, suspend: bool) -> tuple[Action, ...]:
    return () if jobset.suspend == suspend else (SetSuspend(jobset=jobset, suspend=suspend),)
