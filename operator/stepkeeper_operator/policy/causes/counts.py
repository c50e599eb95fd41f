"""Conclude from Jobs and JobSet how an attempt ended whose pods nobody saw end."""

from typing import Final

from stepkeeper.contract import Cause, ExitCode
from stepkeeper_operator.build.failure_policy import RULE_DISRUPTION, RULE_HANG, RULE_SAVED
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.policy.causes.finding import CAUSE_DISRUPTION, CAUSE_FENCED, Finding, Verdict
from stepkeeper_operator.policy.circumstances import Circumstances

__all__ = ["check_job_message", "ended_unseen", "guess_from_jobset"]

_UNSEEN: Final = "it ended unseen; "
_BY_RULE: Final = {
    RULE_HANG: Cause.HANG.value,
    RULE_DISRUPTION: CAUSE_DISRUPTION,
    RULE_SAVED: Cause.REQUESTED.value,
}


def ended_unseen(message: str | None) -> bool:
    """Return True for the message of an attempt that JobSet restarted, and of whose end only its counts told."""
    return message is not None and message.startswith(_UNSEEN)


def check_job_message(evidence: AttemptEvidence | None, circumstances: Circumstances) -> Finding | None:
    """Check the Job's message, which is left when the pods are gone."""
    for batch_job in () if evidence is None else evidence.failed_batch_jobs:
        message = batch_job.failure_message
        if f"exit code {ExitCode.FENCED.value} " in message:
            return Finding(cause=CAUSE_FENCED, message=message, verdict=Verdict.FENCED)
        if any(f"exit code {code} " in message for code in circumstances.fatal_codes):
            return Finding(cause=Cause.APPLICATION_ERROR, message=message, verdict=Verdict.FATAL)
    return None


def guess_from_jobset(circumstances: Circumstances) -> Finding:
    """Guess from the way that JobSet took the end."""
    if circumstances.counted is None and circumstances.rule is None:
        return Finding(cause=Cause.REQUESTED, message="nothing was seen of its end", explained=False)
    if circumstances.counted:
        message = f"{_UNSEEN}JobSet counted a failure of the application"
        return Finding(cause=Cause.APPLICATION_ERROR, message=message, explained=False)
    cause = _BY_RULE.get(circumstances.rule or "", CAUSE_DISRUPTION)
    if cause == CAUSE_DISRUPTION and circumstances.spot:
        cause = Cause.SPOT_PREEMPTION
    message = f"{_UNSEEN}JobSet took it for no failure of the application"
    return Finding(cause=cause, message=message, explained=False)
