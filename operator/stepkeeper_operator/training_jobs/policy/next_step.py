"""Plan the next action on the JobSet: create, keep, suspend or replace it, or end the job."""

from dataclasses import replace
from typing import Any, Final

from stepkeeper.contract import AttemptKind, Cause
from stepkeeper_operator.api.v1alpha1.trainingjob_status import JobSetRef
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.training_jobs.attempts.budgets import count_failures
from stepkeeper_operator.training_jobs.attempts.ends import EDITED, NOT_ALLOWED, close_as_stopped
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.build.jobset import (
    build_jobset,
    machines_hash,
    queue_labels,
    restore_jobset,
    template_hash,
)
from stepkeeper_operator.training_jobs.decision import CreateJobSet, DeleteJobSet
from stepkeeper_operator.training_jobs.observed import View
from stepkeeper_operator.training_jobs.policy.ends import (
    find_completion,
    has_unrecorded_end,
    judge_last_end,
    must_be_replaced,
    plan_after_completion,
    plan_after_failure,
)
from stepkeeper_operator.training_jobs.policy.machines import find_wait
from stepkeeper_operator.training_jobs.policy.plan import (
    Plan,
    find_delay,
    hold_next_start,
    set_backoff,
    set_suspend,
)
from stepkeeper_operator.training_jobs.policy.starts import (
    compute_report_wait_s,
    leaves_queue,
    should_suspend,
)

__all__ = ["find_change", "plan_next", "plan_without_jobset"]

_REQUEUED: Final = "the job's labels kueue.x-k8s.io/* were changed, so its JobSet is replaced"

_LEFT_QUEUE: Final = "the job is suspended, and leaves the queue of Kueue"


def plan_next(view: View, history: JobHistory) -> Plan:
    """Plan the next step from this history. The observed JobSet is the job's own."""
    jobset = view.jobset
    reference = None if jobset is None else JobSetRef(name=jobset.name, uid=jobset.uid)
    plan = Plan(history=history, job_set=reference)
    # The end of a completed JobSet is judged with its pods, below.
    if (jobset is None or not jobset.completed) and (end := find_completion(history)):
        # JobSet may have begun one more start before the operator noticed.
        return replace(plan, end=end, history=history.withdraw() if history.is_running else history)
    if jobset is None:
        return plan_without_jobset(view, history)
    return _plan_with_jobset(view, jobset, plan)


def _plan_with_jobset(view: View, jobset: JobSet, plan: Plan) -> Plan:
    history = plan.history
    failed = must_be_replaced(view, jobset, history)
    if jobset.completed and not failed:
        # Checked before any edit or deletion: a finished training is not repeated.
        completion = plan_after_completion(view, jobset, plan)
        if completion.end is not None or not jobset.deleting:
            return completion  # otherwise it plans the deletion, which has begun
    if jobset.deleting:
        return replace(plan, waiting="the old JobSet's pods are still stopping")
    if change := find_change(view, jobset, history):
        closed = close_as_stopped(history, view, AttemptKind.STOPPED, change)
        return replace(plan, history=closed, actions=(DeleteJobSet(jobset=jobset),), waiting=change)
    if jobset.failure_reason is not None or failed:
        return plan_after_failure(view, jobset, plan)
    return _plan_while_alive(view, jobset, plan)


def find_change(view: View, jobset: JobSet, history: JobHistory) -> str | None:
    """Describe the change since the JobSet's creation that requires a new JobSet; None if there is none."""
    if not view.observed.accepted:
        return None  # no JobSet can be built from the spec
    if _is_outdated(view, jobset):
        return EDITED
    # Kueue accepts no other queue for running pods.
    idle = jobset.suspended and not history.is_running
    return _REQUEUED if idle and jobset.lacks_labels(queue_labels(view.job)) else None


def _is_outdated(view: View, jobset: JobSet) -> bool:
    """Return True if the JobSet was built from another template, or for other machines than the present ones.

    This is unknown, so False, without the machines or while the spec hides changes. Running pods continue even if the
    machines differ.
    """
    machines = view.machines
    if view.is_on_queued_resource and machines is None:
        return False
    if not view.job.spec.hides_changes() and jobset.template_hash != template_hash(view.job, machines):
        return True
    if machines is None or not (machines.ready and jobset.suspended):
        return False
    return jobset.machines_hash != machines_hash(machines)


def _plan_while_alive(view: View, jobset: JobSet, plan: Plan) -> Plan:
    history = plan.history
    last = history.last_attempt
    if history.is_running:
        may_end = has_unrecorded_end(view.job, history)
    else:
        # JobSet acts first on an attempt that has just ended, unless no restart is allowed.
        may_end = last is not None and last.kind == AttemptKind.UNRECOVERABLE
    if may_end and (end := judge_last_end(view.job, history, restarted=history.is_running)):
        stopped = close_as_stopped(history, view, AttemptKind.STOPPED, NOT_ALLOWED)
        return replace(plan, end=end, history=stopped)
    plan = replace(plan, look_again_s=compute_report_wait_s(view, history))
    wait = find_wait(view)
    if wait is not None and not (wait.stop or jobset.suspend):
        wait = None  # hosts that left for a moment stop no running pods
    if not view.observed.is_queued:
        plan = _suspend_or_resume(view, jobset, hold_next_start(view, plan), waits=wait is not None)
    elif leaves_queue(view, history):
        plan = replace(plan, actions=(DeleteJobSet(jobset=jobset),), waiting=_LEFT_QUEUE)
    return plan if wait is None else replace(plan, waiting=wait.message)


def _suspend_or_resume(view: View, jobset: JobSet, plan: Plan, *, waits: bool) -> Plan:
    suspend = waits or plan.waiting is not None or should_suspend(view, plan.history)
    # A job that is not accepted starts nothing, but a restart that only waited for its back-off continues.
    may_resume = view.observed.may_start or plan.history.next_start_time is not None
    return replace(plan, actions=set_suspend(jobset, suspend=suspend)) if suspend or may_resume else plan


def plan_without_jobset(view: View, history: JobHistory) -> Plan:
    """Plan the next JobSet: create it, wait, or end the job."""
    if end := judge_last_end(view.job, history, restarted=False):
        return Plan(history=history, job_set=None, end=end)
    if _number_was_used(view, history):
        # Reserve the next number in the status before the JobSet's creation: no second JobSet may get it.
        history = history.note(
            job_sets=history.operator.job_sets + 1,
            started=False,
            restarts_seen=0,
            resumed_at=None,
            counted_restarts_seen=0,
        )
    history, wait_s = set_backoff(view, history)
    plan = Plan(history=history, job_set=None)
    if delay := find_delay(view, history, wait_s=wait_s):
        reason, look_again_s = delay
        return replace(plan, waiting=reason, look_again_s=look_again_s)
    creation = CreateJobSet(manifest=_build_next(view, history))
    return replace(plan, actions=(creation,), waiting="its JobSet is being created")


def _build_next(view: View, history: JobHistory) -> dict[str, Any]:
    number, failures_left = history.operator.job_sets - 1, _count_failures_left(view, history)
    if (kept := view.observed.kept_jobset) is not None:
        return restore_jobset(kept, number=number, failures_left=failures_left)
    return build_jobset(
        view.job,
        number=number,
        failures_left=failures_left,
        unreachable_s=view.settings.unreachable_toleration_s,
        machines=view.machines,
    )


def _number_was_used(view: View, history: JobHistory) -> bool:
    """Return True if a JobSet had the last reserved number: the status names it, or only its pods show it."""
    resources, last = view.job.status.resources, history.operator.job_sets - 1
    if history.operator.job_sets == 0 or (resources is not None and resources.job_set is not None):
        return True
    return any(evidence.ordinal[0] == last for evidence in view.observed.evidence)


def _count_failures_left(view: View, history: JobHistory) -> int:
    """Count the restarts after failures that the next JobSet may do."""
    n_failures, last = count_failures(history.restarts), history.last_attempt
    if last is not None and last.cause == Cause.APPLICATION_ERROR:
        n_failures += 1  # this JobSet is itself a restart
    return max(0, view.job.spec.restarts.max_failures - n_failures)
