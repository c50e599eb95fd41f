"""Judge what an end leads to: the end of the job, a wait, or the next JobSet."""

from dataclasses import replace
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.decision import DeleteJobSet, JobEnd
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import find_last_evidence, find_masked, runs_down
from stepkeeper_operator.policy.attempts import was_asked_for
from stepkeeper_operator.policy.budgets import explain_exhausted_budget
from stepkeeper_operator.policy.causes.find_cause import ended_unseen
from stepkeeper_operator.policy.history import CAUSE_FENCED, JobHistory, Verdict
from stepkeeper_operator.policy.planning.plan import BACKING_OFF, Plan, set_backoff
from stepkeeper_operator.policy.pod_ends import stopped_with_0, tells_own_limits
from stepkeeper_operator.settings import OperatorSettings

__all__ = [
    "TRAINING_DONE",
    "failed_unseen",
    "has_unrecorded_end",
    "judge_done",
    "judge_last_end",
    "plan_after_completion",
    "plan_after_failure",
]

TRAINING_DONE: Final = "TrainingDone"


def judge_done(history: JobHistory) -> JobEnd | None:
    """Return the end of the job if an attempt has ended without a cause: its training is done."""
    done = next((each for each in history.attempts if each.end is not None and each.cause is None), None)
    return None if done is None else JobEnd(complete=True, reason=TRAINING_DONE, message=done.message or "")


def judge_last_end(job: CheckpointedTrainingJob, history: JobHistory, *, restarted: bool) -> JobEnd | None:
    """Return the end of the job if its newest ended attempt leaves no restart.

    A judgement by the budgets is final: an edit of them ends no attempt that was allowed to start.
    """
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
    if restarted and _is_recorded(job, history, attempt):
        return None
    why = explain_exhausted_budget(job.spec.restarts, history.restarts, attempt.cause, restarted=restarted)
    if why is None:
        return None
    reason = "MaxFailuresReached" if attempt.cause == Cause.APPLICATION_ERROR else "MaxDisruptionsReached"
    return JobEnd(complete=False, reason=reason, message=f"{why}. The last time: {said}")


def _find_newest_ended(history: JobHistory) -> Attempt | None:
    return next((attempt for attempt in reversed(history.attempts) if attempt.end is not None), None)


def has_unrecorded_end(job: CheckpointedTrainingJob, history: JobHistory) -> bool:
    """Return True if the status lacks the running attempt, or what is known of the cause of the end before it."""
    ended = _find_newest_ended(history)
    if ended is None or not _is_recorded(job, history, ended):
        return True
    return _tell_whether_guessed(ended) not in map(_tell_whether_guessed, job.status.attempts)


def _is_recorded(job: CheckpointedTrainingJob, history: JobHistory, ended: Attempt) -> bool:
    """Return True if the status has the running attempt, and the cause of the end before it."""
    running, known = history.last_attempt, job.status.attempts
    if running is None or not known or known[-1].number != running.number:
        return False
    return any((entry.number, entry.cause) == (ended.number, ended.cause) for entry in known)


def _tell_whether_guessed(attempt: Attempt) -> tuple[int, bool]:
    return attempt.number, ended_unseen(attempt.message)


def _is_provisional(job: CheckpointedTrainingJob, observed: Observed, history: JobHistory) -> bool:
    """Tell whether the cause of the last end can still turn out to be another, so that nothing final may follow.

    Survivors fail before the machines of their peers are seen to be gone: while a pod of another slice has not ended,
    its node may be one that is lost.
    """
    finding = history.finding
    if finding is None or finding.verdict is not Verdict.RESTART:
        return False
    on_machines = job.spec.placement.queued_resource_name is not None
    by_loss = finding.cause == Cause.APPLICATION_ERROR and not tells_own_limits(finding.message)
    return not finding.explained or (by_loss and (on_machines or runs_down(history, observed)))


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
        if open_s > 0 and _is_provisional(job, observed, history):
            return replace(plan, waiting="the cause of its end is not known yet", look_again_s=open_s)
        return replace(plan, end=end)
    history, wait_s = set_backoff(job, observed, history, now)
    if wait_s > 0 and jobset.is_finished:
        return replace(plan, history=history, waiting=BACKING_OFF, look_again_s=wait_s)
    return replace(
        plan, history=history, actions=(DeleteJobSet(jobset=jobset),), waiting="its JobSet is being replaced"
    )
