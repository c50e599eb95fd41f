"""Build the failure policies: which pod failures fail the Job, and which failed Jobs restart or fail the JobSet."""

from typing import Any, Final

from stepkeeper.contract import CONTAINER_NAME, ExitCode
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.labels import HANG_CONDITION

__all__ = [
    "RULE_DISRUPTION",
    "RULE_HANG",
    "RULE_SAVED",
    "build_job_policy",
    "build_jobset_policy",
    "limit_restarts",
]

_RULE_FENCED: Final = "fenced"
_RULE_FATAL: Final = "fatal"
RULE_HANG: Final = "hang"
RULE_DISRUPTION: Final = "disruption"
RULE_SAVED: Final = "saved"

_MAX_IN_PLACE_FAILURES: Final = 2
"""Restarts after application failures that JobSet does by itself, without an operator and without back-off."""


def build_job_policy(job: CheckpointedTrainingJob) -> dict[str, Any]:
    """Build one rule for each cause: a Job's message to its JobSet contains only the matching rule.

    The first match wins. A preempted trainer exits 75 and 143 alike, so conditions come before codes.
    """
    rules = [_on_condition(HANG_CONDITION), _on_condition("DisruptionTarget")]
    rules += [_on_codes([ExitCode.SAVED]), _on_codes([ExitCode.FENCED])]
    if codes := _fatal_codes(job):
        rules.append(_on_codes(codes))
    return {"rules": rules}


def build_jobset_policy(job: CheckpointedTrainingJob, *, failures_left: int) -> dict[str, Any]:
    """Build the policy of a JobSet with `failures_left` restarts after failures.

    A failed Job that matches no rule counts towards maxRestarts as an application failure. JobSet matches the text of
    the Job's failure message.
    """
    neutral, final = "RestartJobSetAndIgnoreMaxRestarts", "FailJobSet"
    rules = [_rule(_RULE_FENCED, final, _code_pattern([ExitCode.FENCED]))]
    if codes := _fatal_codes(job):
        rules.append(_rule(_RULE_FATAL, final, _code_pattern(codes)))
    rules.append(_rule(RULE_HANG, neutral, f"has condition {HANG_CONDITION} matching FailJob rule"))
    rules.append(_rule(RULE_DISRUPTION, neutral, "has condition DisruptionTarget matching FailJob rule"))
    rules.append(_rule(RULE_SAVED, neutral, _code_pattern([ExitCode.SAVED])))
    return {
        "maxRestarts": limit_restarts(failures_left),
        "restartStrategy": "BlockingRecreate",
        "rules": rules,
    }


def limit_restarts(failures_left: int) -> int:
    """Return how often JobSet restarts after failures, if `failures_left` restarts are left for the job."""
    return min(_MAX_IN_PLACE_FAILURES, failures_left)


def _fatal_codes(job: CheckpointedTrainingJob) -> list[int]:
    """List the user's fatal codes without the runtime's own exit codes, which are never fatal."""
    return sorted(set(job.spec.restarts.fatal_exit_codes) - {int(code) for code in ExitCode})


def _on_condition(kind: str) -> dict[str, Any]:
    return {"action": "FailJob", "onPodConditions": [{"type": kind, "status": "True"}]}


def _on_codes(codes: list[int]) -> dict[str, Any]:
    values = [int(code) for code in codes]
    return {
        "action": "FailJob",
        "onExitCodes": {"containerName": CONTAINER_NAME, "operator": "In", "values": values},
    }


def _code_pattern(codes: list[int]) -> str:
    alternatives = "|".join(str(int(code)) for code in codes)
    return f"failed with exit code ({alternatives}) matching FailJob rule"


def _rule(name: str, action: str, pattern: str) -> dict[str, Any]:
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [pattern],
    }
