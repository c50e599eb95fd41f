"""Find why an attempt ended, from the evidence of its pods, its Jobs and its machines."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from stepkeeper.contract import Cause, ExitCode
from stepkeeper_operator.build.failure_policy import RULE_DISRUPTION, RULE_HANG, RULE_SAVED
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.policy.causes.disruptions import (
    check_deleted,
    check_disrupted,
    check_hang,
    check_node_lost,
    check_node_restarted,
    check_saved,
)
from stepkeeper_operator.policy.causes.failures import (
    check_failed,
    check_failed_first,
    check_over_limits,
    check_peers_lost,
)
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.history import CAUSE_DISRUPTION, CAUSE_FENCED, NO_CAUSE, Finding, Verdict
from stepkeeper_operator.policy.machines import MachinesLoss
from stepkeeper_operator.policy.pod_ends import describe_other_failure, last_error_line, tells_own_limits

__all__ = ["add_decision", "attribute_to_loss", "ended_unseen", "find_cause"]

_BY_LOSS: Final = {
    Cause.NODE_FAILURE,
    Cause.EVICTION,
    Cause.REQUESTED,
    Cause.APPLICATION_ERROR,
    CAUSE_DISRUPTION,
}
"""Causes that ends of pods give when their machines are taken away; those whose peers are gone fail on their own."""

_UNSEEN: Final = "it ended unseen; "
_BY_RULE: Final = {
    RULE_HANG: Cause.HANG.value,
    RULE_DISRUPTION: CAUSE_DISRUPTION,
    RULE_SAVED: Cause.REQUESTED.value,
}


def find_cause(evidence: AttemptEvidence | None, circumstances: Circumstances) -> Finding:
    """Find the best explanation.

    Disruptions come before failures: survivors of a disruption fail soon after and are seen first.
    """
    pods = () if evidence is None else tuple(sorted(evidence.pods, key=_sort_key))
    finding = (
        _check_done(pods, circumstances)
        or _check_fenced(pods)
        or check_hang(pods)
        or check_disrupted(pods, circumstances)
        or check_node_lost(pods, circumstances)
        or check_node_restarted(pods)
        or check_over_limits(pods)
        or check_failed_first(pods, circumstances)
        or check_saved(pods, circumstances)
        or check_failed(pods, circumstances)
        or check_peers_lost(pods, circumstances)
        or check_deleted(pods)
        or _check_job_message(evidence, circumstances)
    )
    finding = finding or _guess_from_jobset(circumstances)
    finding = replace(finding, message=add_decision(finding.message, pods))
    return attribute_to_loss(finding, circumstances.loss)


def _sort_key(pod: Pod) -> tuple[float, tuple[int, int]]:
    return (float("inf") if pod.finished_at is None else pod.finished_at, pod.rank)


def _check_fenced(pods: tuple[Pod, ...]) -> Finding | None:
    pod = next((pod for pod in pods if pod.code == ExitCode.FENCED and pod.disruption is None), None)
    if pod is None:
        return None
    detail = last_error_line(pod) or "the storage log names another claim"
    message = f"pod {pod.name} found that another claim owns the checkpoint root: {detail}"
    return Finding(cause=CAUSE_FENCED, message=message, node=pod.node, verdict=Verdict.FENCED)


def _check_done(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    """Check for trainers on all hosts that exited 0 and said that the training is done: no restart helps then.

    The newest pod of each rank counts, also of ranks that an edit of the number of hosts has left out since.
    """
    newest = {pod.rank: pod for pod in sorted(pods, key=lambda pod: pod.created_at)}
    if len(newest) < circumstances.n_hosts or not all(map(_said_done, newest.values())):
        return None
    message = "every trainer exited 0 and said that the training is done"
    others = [describe_other_failure(pod) for pod in pods if pod.other_failure is not None]
    return Finding(cause=NO_CAUSE, message="; ".join([message, *others[:1]]))


def _said_done(pod: Pod) -> bool:
    """Return True if the trainer exited 0 and said that the training is done, with no notice to stop before that."""
    said = pod.termination
    return pod.exit_code == 0 and said is not None and said.code == ExitCode.DONE and said.notice is None


def attribute_to_loss(finding: Finding, loss: MachinesLoss | None) -> Finding:
    """Give an end that the loss of the job's machines explains the cause of that loss."""
    if loss is None or finding.verdict is not Verdict.RESTART or tells_own_limits(finding.message):
        return finding
    if finding.explained and finding.cause not in _BY_LOSS:
        return finding
    return replace(finding, cause=loss.cause, message=f"{finding.message}; {loss.message}", explained=True)


def ended_unseen(message: str | None) -> bool:
    """Return True for the message of an attempt that JobSet restarted, and of whose end only its counts told."""
    return message is not None and message.startswith(_UNSEEN)


def _check_job_message(evidence: AttemptEvidence | None, circumstances: Circumstances) -> Finding | None:
    """Check the Job's message, which is left when the pods are gone."""
    for batch_job in () if evidence is None else evidence.failed_batch_jobs:
        message = batch_job.failure_message
        if f"exit code {ExitCode.FENCED.value} " in message:
            return Finding(cause=CAUSE_FENCED, message=message, verdict=Verdict.FENCED)
        if any(f"exit code {code} " in message for code in circumstances.fatal_codes):
            return Finding(cause=Cause.APPLICATION_ERROR, message=message, verdict=Verdict.FATAL)
    return None


def _guess_from_jobset(circumstances: Circumstances) -> Finding:
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


def add_decision(message: str, pods: Iterable[Pod], *, behind: str = "; ") -> str:
    """Add to the message what the first of the pods that says so chose to save. What is in it isn't added again."""
    said = (pod.termination.decision for pod in pods if pod.termination is not None)
    decisions = [each for each in said if each is not None]
    if not decisions or any(each in message for each in decisions):
        return message
    return f"{message}{behind}{decisions[0]}"
