"""Plan what happens to the JobSet next: make, keep, suspend or replace it, or end the job."""

from dataclasses import replace
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import JobSetRef
from stepkeeper_operator.build import build_jobset, machines_hash, queue_labels, template_hash
from stepkeeper_operator.decision import CreateJobSet, DeleteJobSet
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempts import EDITED, NOT_ALLOWED, close_as_requested, withdraw_attempt
from stepkeeper_operator.policy.budgets import count_failures
from stepkeeper_operator.policy.history import JobHistory, Verdict
from stepkeeper_operator.policy.machines import find_wait
from stepkeeper_operator.policy.planning.judgement import (
    failed_unseen,
    has_unrecorded_end,
    judge_done,
    judge_last_end,
    plan_after_completion,
    plan_after_failure,
)
from stepkeeper_operator.policy.planning.plan import (
    Plan,
    find_delay,
    hold_next_start,
    set_backoff,
    set_suspend,
)
from stepkeeper_operator.policy.starts import compute_report_wait_s, leaves_queue, should_suspend
from stepkeeper_operator.settings import OperatorSettings

__all__ = ["find_change", "plan_next", "plan_without_jobset"]

_REQUEUED: Final = "its labels kueue.x-k8s.io/* were changed, so its JobSet is made anew"

_LEFT_QUEUE: Final = "it is suspended, and leaves the queue that Kueue admits it from"


def find_change(
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

    Without its machines that can't be known yet, nor while the spec hides changes. What runs continues, whatever is
    learnt of the machines meanwhile.
    """
    machines = observed.machines
    if job.spec.placement.queued_resource_name is not None and machines is None:
        return False
    if not job.spec.hides_changes() and jobset.template_hash != template_hash(job, machines):
        return True
    if machines is None or not (machines.ready and jobset.suspended):
        return False
    return jobset.machines_hash != machines_hash(machines)


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
    plan = Plan(
        history=history, job_set=None if jobset is None else JobSetRef(name=jobset.name, uid=jobset.uid)
    )
    if (jobset is None or not jobset.completed) and (end := judge_done(history)):
        # JobSet may have begun one more start before the operator saw that.
        return replace(plan, end=end, history=withdraw_attempt(history) if history.is_running else history)
    if jobset is None:
        return plan_without_jobset(job, observed, history, settings=settings, now=now)
    return _plan_with_jobset(job, observed, jobset, plan, settings=settings, now=now)


def _plan_with_jobset(
    job: CheckpointedTrainingJob,
    observed: Observed,
    jobset: JobSet,
    plan: Plan,
    *,
    settings: OperatorSettings,
    now: float,
) -> Plan:
    history = plan.history
    failed = failed_unseen(job, observed, jobset, history)
    completion = (
        plan_after_completion(job, observed, jobset, plan) if jobset.completed and not failed else None
    )
    # Before any edit or deletion: what is done isn't done again.
    if completion is not None and (completion.end is not None or not jobset.deleting):
        return completion
    if jobset.deleting:
        return replace(plan, waiting="the old JobSet's pods are still stopping")
    if change := find_change(job, jobset, observed, history):
        closed = close_as_requested(history, observed, change, now=now)
        return replace(plan, history=closed, actions=(DeleteJobSet(jobset=jobset),), waiting=change)
    if jobset.failure_reason is not None or failed:
        return plan_after_failure(job, observed, jobset, plan, settings=settings, now=now)
    return _plan_while_alive(job, observed, jobset, plan, now=now)


def _plan_while_alive(
    job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, plan: Plan, *, now: float
) -> Plan:
    history = plan.history
    # JobSet acts first on an attempt that has just ended, unless no restart of it can be right.
    final = history.finding is not None and history.finding.verdict is not Verdict.RESTART
    to_judge = has_unrecorded_end(job, history) if history.is_running else final
    if to_judge and (end := judge_last_end(job, history, restarted=history.is_running)):
        return replace(plan, end=end, history=close_as_requested(history, observed, NOT_ALLOWED, now=now))
    plan = replace(plan, look_again_s=compute_report_wait_s(job, observed, history, now=now))
    wait = find_wait(job, observed)
    # Hosts that left for a moment stop nothing that runs, but nothing starts without them.
    waits = wait is not None and (wait.stop or jobset.suspend)
    if observed.is_queued:
        left = leaves_queue(job, observed, history, now=now)
        plan = replace(plan, actions=(DeleteJobSet(jobset=jobset),), waiting=_LEFT_QUEUE) if left else plan
    else:
        plan = hold_next_start(job, observed, plan, now=now)
        stops = should_suspend(job, observed, plan.history, now=now)
        wanted = waits or stops or plan.waiting is not None
        # A back-off only spaces the restarts of what goes on, also of a job that isn't accepted.
        resumes = not observed.held or plan.history.bookkeeping.not_before is not None
        if wanted or resumes:
            plan = replace(plan, actions=set_suspend(jobset, suspend=wanted))
    return replace(plan, waiting=wait.message) if waits and wait is not None else plan


def plan_without_jobset(
    job: CheckpointedTrainingJob,
    observed: Observed,
    history: JobHistory,
    *,
    settings: OperatorSettings,
    now: float,
) -> Plan:
    """Plan the next JobSet: make it, or wait, or end the job."""
    if end := judge_last_end(job, history, restarted=False):
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
    history, wait_s = set_backoff(job, observed, history, now)
    plan = Plan(history=history, job_set=None)
    delay = find_delay(job, observed, history, wait_s=wait_s, now=now)
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
