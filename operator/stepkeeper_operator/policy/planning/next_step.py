"""Plan what happens to the JobSet next: make, keep, suspend or replace it, or end the job."""

from dataclasses import replace
from typing import Final

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import JobSetRef
from stepkeeper_operator.decision import DeleteJobSet
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempts import NOT_ALLOWED, close_as_requested, withdraw_attempt
from stepkeeper_operator.policy.causes.finding import Verdict
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.machines import find_wait
from stepkeeper_operator.policy.planning.changes import find_change
from stepkeeper_operator.policy.planning.finished import (
    failed_unseen,
    plan_after_completion,
    plan_after_failure,
)
from stepkeeper_operator.policy.planning.judgement import has_unrecorded_end, judge_done, judge_last_end
from stepkeeper_operator.policy.planning.making import plan_without_jobset
from stepkeeper_operator.policy.planning.plan import Plan, set_suspend
from stepkeeper_operator.policy.planning.waits import hold_next_start
from stepkeeper_operator.policy.queueing import leaves_queue, should_suspend
from stepkeeper_operator.policy.starts import compute_report_wait_s
from stepkeeper_operator.settings import OperatorSettings

__all__ = ["plan_next"]

_LEFT_QUEUE: Final = "it is suspended, and leaves the queue that Kueue admits it from"


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
