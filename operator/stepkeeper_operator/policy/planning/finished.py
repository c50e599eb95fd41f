"""Plan what follows a JobSet that has completed or failed."""

from dataclasses import replace

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.decision import DeleteJobSet, JobEnd
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import find_last_evidence, find_masked
from stepkeeper_operator.policy.attempts import was_asked_for
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.planning.judgement import is_provisional, judge_last_end
from stepkeeper_operator.policy.planning.plan import Plan
from stepkeeper_operator.policy.planning.waits import BACKING_OFF, set_backoff
from stepkeeper_operator.policy.pod_ends import stopped_with_0
from stepkeeper_operator.settings import OperatorSettings

__all__ = ["failed_unseen", "plan_after_completion", "plan_after_failure"]


def failed_unseen(
    job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, history: JobHistory
) -> bool:
    """Tell whether the attempt has ended by pods that JobSet takes for done: it restarts nothing then."""
    last = history.last_attempt
    if last is None or last.end is None or was_asked_for(last.message):
        return False
    evidence = find_last_evidence(history, observed)
    acts = evidence is not None and any(pod.phase == "Failed" for pod in evidence.pods)
    return (jobset.completed or not acts) and bool(find_masked(history, observed, job.spec.total_steps))


def plan_after_completion(
    job: CheckpointedTrainingJob, observed: Observed, jobset: JobSet, plan: Plan
) -> Plan:
    """Plan what follows when every pod has exited 0: the end, unless they were told to stop."""
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
    """Tell whether a program exited 0 because it was told to stop, or may have: nobody knows then how far it was."""
    evidence = find_last_evidence(history, observed)
    return evidence is None or not evidence.pods or any(map(stopped_with_0, evidence.pods))


def plan_after_failure(
    job: CheckpointedTrainingJob,
    observed: Observed,
    jobset: JobSet,
    plan: Plan,
    *,
    settings: OperatorSettings,
    now: float,
) -> Plan:
    """Plan what follows a JobSet that has failed: the end, a wait, or the next one.

    One whose other pods still run is deleted before the wait.
    """
    history = plan.history
    last = history.last_attempt
    if end := judge_last_end(job, history, restarted=False):
        open_s = (0 if last is None or last.end is None else last.end) + settings.reattribution_s - now
        if open_s > 0 and is_provisional(job, observed, history):
            return replace(plan, waiting="the cause of its end is not known yet", look_again_s=open_s)
        return replace(plan, end=end)
    history, wait_s = set_backoff(job, observed, history, now)
    if wait_s > 0 and jobset.is_finished:
        return replace(plan, history=history, waiting=BACKING_OFF, look_again_s=wait_s)
    return replace(
        plan, history=history, actions=(DeleteJobSet(jobset=jobset),), waiting="its JobSet is being replaced"
    )
