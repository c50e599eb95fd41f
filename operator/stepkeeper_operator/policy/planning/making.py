"""Plan the next JobSet of a job that has none."""

from dataclasses import replace

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.build import build_jobset
from stepkeeper_operator.decision import CreateJobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.budgets import count_failures
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.planning.judgement import judge_last_end
from stepkeeper_operator.policy.planning.plan import Plan
from stepkeeper_operator.policy.planning.waits import find_delay, set_backoff
from stepkeeper_operator.settings import OperatorSettings

__all__ = ["plan_without_jobset"]


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
