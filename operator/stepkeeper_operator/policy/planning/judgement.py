"""Judge whether the newest end of a job leaves it a restart."""

from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.decision import JobEnd
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import runs_down
from stepkeeper_operator.policy.budgets import explain_exhausted_budget
from stepkeeper_operator.policy.causes.counts import ended_unseen
from stepkeeper_operator.policy.causes.finding import CAUSE_FENCED, Verdict
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.pod_ends import tells_own_limits

__all__ = ["TRAINING_DONE", "has_unrecorded_end", "is_provisional", "judge_done", "judge_last_end"]

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


def is_provisional(job: CheckpointedTrainingJob, observed: Observed, history: JobHistory) -> bool:
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
