"""Find why an attempt ended, from the evidence of its pods."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from stepkeeper.contract import Cause, ExitCode
from stepkeeper_operator.build.failure_policy import RULE_DISRUPTION, RULE_HANG, RULE_SAVED
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.labels import NODE_LOST_REASON
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.machines import MachinesLoss
from stepkeeper_operator.policy.pod_ends import (
    FROM_A_PEER,
    SIGNAL_CODES,
    describe_eviction,
    describe_failure,
    died_of_signal,
    ended_by_deletion,
    last_error_line,
    only_peers_told,
    tells_own_limits,
    was_killed,
    was_stopped,
)

__all__ = [
    "CAUSE_DISRUPTION",
    "CAUSE_FENCED",
    "Finding",
    "Verdict",
    "attribute_to_loss",
    "ended_unseen",
    "find_cause",
]

CAUSE_FENCED: Final = "Fenced"
CAUSE_DISRUPTION: Final = Cause.DISRUPTION.value

_BY_SCHEDULER: Final = "PreemptionByScheduler"
_BY_REASON: Final = {
    _BY_SCHEDULER: Cause.SCHEDULER_PREEMPTION,
    "EvictionByEvictionAPI": Cause.EVICTION,
    "DeletionByTaintManager": Cause.NODE_FAILURE,
    "DeletionByPodGC": Cause.NODE_FAILURE,
    NODE_LOST_REASON: Cause.NODE_FAILURE,
}
_SIGTERM: Final = "sigterm"
"""The notice that a pod names whose process was told to end."""

_BY_KUBELET: Final = "TerminationByKubelet"
_EVICTED: Final = "Evicted"
_SHUTDOWN_REASONS: Final = {"NodeShutdown", "Terminated", "Shutdown"}
_CLOUDS: Final = {Cause.SPOT_PREEMPTION, Cause.MAINTENANCE}
"""The causes that the cloud announces to a machine itself."""

_MADE_UP: Final = {"Unknown", "ContainerStatusUnknown"}
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


class Verdict(Enum):
    """The consequence of an end for the job."""

    RESTART = "restart"
    FENCED = "fenced"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The cause of an attempt's end, as far as it is known."""

    cause: str
    message: str
    node: str | None = None
    verdict: Verdict = Verdict.RESTART
    explained: bool = True
    """False: the cause is a guess, and any evidence replaces it."""


def find_cause(evidence: AttemptEvidence | None, circumstances: Circumstances) -> Finding:
    """Find the best explanation.

    Disruptions come before failures: survivors of a disruption fail soon after and are seen first.
    """
    pods = () if evidence is None else tuple(sorted(evidence.pods, key=_sort_key))
    finding = (
        _check_fenced(pods)
        or _check_hang(pods)
        or _check_disrupted(pods, circumstances)
        or _check_node_lost(pods, circumstances)
        or _check_node_restarted(pods)
        or _check_over_limits(pods)
        or _check_failed_first(pods, circumstances)
        or _check_saved(pods, circumstances)
        or _check_failed(pods, circumstances)
        or _check_peers_lost(pods, circumstances)
        or _check_deleted(pods)
        or _check_job_message(evidence, circumstances)
    )
    finding = _add_decision(finding or _guess_from_jobset(circumstances), pods)
    return attribute_to_loss(finding, circumstances.loss)


def ended_unseen(message: str | None) -> bool:
    """Return True for the message of an attempt that JobSet restarted, and of whose end only its counts told."""
    return message is not None and message.startswith(_UNSEEN)


def _add_decision(finding: Finding, pods: tuple[Pod, ...]) -> Finding:
    """Add to the message what the training chose to save in the time that it had left."""
    said = (pod.termination.decision for pod in pods if pod.termination is not None)
    decision = next((each for each in said if each is not None), None)
    return finding if decision is None else replace(finding, message=f"{finding.message}; {decision}")


def attribute_to_loss(finding: Finding, loss: MachinesLoss | None) -> Finding:
    """Give an end that the loss of the job's machines explains the cause of that loss."""
    if loss is None or finding.verdict is not Verdict.RESTART or tells_own_limits(finding.message):
        return finding
    if finding.explained and finding.cause not in _BY_LOSS:
        return finding
    return replace(finding, cause=loss.cause, message=f"{finding.message}; {loss.message}", explained=True)


def _sort_key(pod: Pod) -> tuple[float, tuple[int, int]]:
    return (float("inf") if pod.finished_at is None else pod.finished_at, pod.rank)


def _first(pods: Iterable[Pod]) -> Pod | None:
    return next(iter(pods), None)


def _check_fenced(pods: tuple[Pod, ...]) -> Finding | None:
    pod = _first(pod for pod in pods if pod.code == ExitCode.FENCED and pod.disruption is None)
    if pod is None:
        return None
    detail = last_error_line(pod) or "the storage log names another claim"
    message = f"pod {pod.name} found that another claim owns the checkpoint root: {detail}"
    return Finding(cause=CAUSE_FENCED, message=message, node=pod.node, verdict=Verdict.FENCED)


def _check_hang(pods: tuple[Pod, ...]) -> Finding | None:
    pod = _first(pod for pod in pods if pod.hang)
    if pod is None:
        return None
    return Finding(cause=Cause.HANG, message=f"pod {pod.name} made no progress", node=pod.node)


def _check_disrupted(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    for pod in pods:
        going = pod.deadline is not None or pod.terminal
        if going and (cause := _classify_disruption(pod, circumstances)) is not None:
            reason = pod.disruption or pod.reason
            message = f"pod {pod.name} was ended by {reason} on node {pod.node}"
            return Finding(cause=cause, message=message, node=pod.node)
    return None


def _classify_disruption(pod: Pod, circumstances: Circumstances) -> str | None:
    if pod.disruption == _BY_KUBELET and pod.reason == _EVICTED:
        return Cause.EVICTION
    shuts_down = pod.disruption == _BY_KUBELET or (pod.disruption is None and pod.reason in _SHUTDOWN_REASONS)
    if not shuts_down and pod.disruption is None:
        return None
    said = None if pod.termination is None else pod.termination.cause
    if said in _CLOUDS and pod.disruption != _BY_SCHEDULER:
        return said  # the cloud tells its machines why it takes them; Kubernetes knows only how the pod ended
    if shuts_down:
        node = circumstances.nodes.get(pod.node or "")
        spot = circumstances.spot if node is None else node.spot
        return Cause.SPOT_PREEMPTION if spot else Cause.MAINTENANCE
    return _BY_REASON.get(pod.disruption or "", CAUSE_DISRUPTION)


def _check_node_lost(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    for pod in pods:
        node = circumstances.nodes.get(pod.node or "")
        if not pod.terminal and pod.exit_code is None and node is not None and node.lost:
            message = f"node {node.name} was lost with pod {pod.name} on it"
            return Finding(cause=Cause.NODE_FAILURE, message=message, node=node.name)
    return None


def _check_node_restarted(pods: tuple[Pod, ...]) -> Finding | None:
    """Check for a node that restarted: it knows only that its containers are gone, and makes up their exit codes."""
    for pod in pods:
        made_up = pod.exit_reason in _MADE_UP and pod.termination is None and pod.exit_code is not None
        if made_up and not was_killed(pod):
            message = f"node {pod.node} restarted or lost track of pod {pod.name} ({pod.exit_reason})"
            return Finding(cause=Cause.NODE_FAILURE, message=message, node=pod.node)
    return None


def _check_failed_first(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    """Check for a failure that the other pods were stopped for: they save and exit 75 when their Job deletes them.

    Or when they hear of a stop from each other: a launcher stops its processes for a failure on another host, and that
    is no notice of the cluster's.
    """
    saved = [pod for pod in pods if pod.code == ExitCode.SAVED]
    if not saved:
        return None
    if all(was_stopped(pod) for pod in saved):
        return _check_failed(pods, circumstances) or _check_peers_lost(pods, circumstances)
    if circumstances.notice not in {None, FROM_A_PEER} or not only_peers_told(pods):
        return None
    own = [pod for pod in _find_guilty(pods, circumstances) if not died_of_signal(pod)]
    return _blame(own, circumstances) if own else None


def _check_over_limits(pods: tuple[Pod, ...]) -> Finding | None:
    """Check for a pod that its kubelet evicted for what the pod itself used, and not for what its node lacks."""
    pod = _first(pod for pod in pods if pod.terminal and pod.reason == _EVICTED and pod.disruption is None)
    if pod is None:
        return None
    return Finding(cause=Cause.APPLICATION_ERROR, message=describe_eviction(pod), node=pod.node)


def _check_saved(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    stopped = [pod for pod in pods if pod.code == ExitCode.SAVED]
    if not stopped:
        return None
    # One rank hears of a disruption, and the others of it.
    pod = min(stopped, key=_rank_of_knowledge)
    last = pod.termination
    notice = (last.notice if last is not None else None) or circumstances.notice
    explained = (
        notice is not None or circumstances.committed or (last is not None and last.committed is not None)
    )
    cause = last.cause if last is not None and last.cause is not None else Cause.REQUESTED.value
    why = f"after notice {notice!r}" if notice else "without a notice that is known"
    message = f"pod {pod.name} stopped with exit code {ExitCode.SAVED.value} {why}"
    maintenance = circumstances.maintenance
    if maintenance is not None and notice == _SIGTERM and cause == Cause.REQUESTED and not was_stopped(pod):
        return Finding(
            cause=maintenance.cause, message=f"{message}; {maintenance.message}", node=pod.node
        )  # nobody deletes the pod, so the machine has told it
    return Finding(cause=cause, message=message, node=pod.node, explained=explained)


def _rank_of_knowledge(pod: Pod) -> int:
    last = pod.termination
    if last is None:
        return 3
    if last.cause is not None:
        return 0
    return 2 if last.notice in {None, FROM_A_PEER} else 1


def _check_failed(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    if guilty := _find_guilty(pods, circumstances):
        return _blame(guilty, circumstances)
    return _check_other_container(pods) or _check_never_ran(pods)


def _find_guilty(pods: tuple[Pod, ...], circumstances: Circumstances) -> list[Pod]:
    """Find the pods whose trainers failed by themselves, the first one first."""
    neutral = {ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER_LOST}
    return [
        pod
        for pod in pods
        if pod.code is not None
        and pod.code not in neutral
        and (not was_killed(pod) or _is_fatal(pod, circumstances))
    ]


def _blame(guilty: list[Pod], circumstances: Circumstances) -> Finding:
    fatal = _first(pod for pod in guilty if pod.code in circumstances.fatal_codes)
    pod = fatal or guilty[0]
    verdict = Verdict.RESTART if fatal is None else Verdict.FATAL
    return Finding(
        cause=Cause.APPLICATION_ERROR, message=describe_failure(pod), node=pod.node, verdict=verdict
    )


def _is_fatal(pod: Pod, circumstances: Circumstances) -> bool:
    """Tell whether the trainer said that no restart helps. A signal's code says nothing."""
    return pod.code in circumstances.fatal_codes and pod.code not in SIGNAL_CODES


def _check_other_container(pods: tuple[Pod, ...]) -> Finding | None:
    """Check init containers and sidecars, which are the application's own.

    A trainer that failed too is judged first.
    """
    for pod in pods:
        other = pod.other_failure
        alone = pod.phase == "Failed" and pod.code in {None, ExitCode.DONE}
        if other is None or not alone or ended_by_deletion(pod, other.code, other.reason, other.finished_at):
            continue
        text = f"container {other.name!r} of pod {pod.name} exited with code {other.code}"
        why = f" ({other.reason})" if other.reason not in {None, "Error"} else ""
        said = f": {other.last_words}" if other.last_words else ""
        return Finding(cause=Cause.APPLICATION_ERROR, message=text + why + said, node=pod.node)
    return None


def _check_never_ran(pods: tuple[Pod, ...]) -> Finding | None:
    pod = _first(
        pod for pod in pods if pod.phase == "Failed" and pod.exit_code is None and pod.other_failure is None
    )
    if pod is None:
        return None
    message = f"pod {pod.name} failed without an exit code ({pod.reason or 'no reason given'})"
    return Finding(cause=Cause.NODE_FAILURE, message=message, node=pod.node, explained=False)


def _check_peers_lost(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    pod = _first(pod for pod in pods if pod.code == ExitCode.PEER_LOST)
    if pod is None:
        return None
    cause = Cause.NODE_FAILURE if circumstances.committed else Cause.APPLICATION_ERROR
    message = f"pod {pod.name} lost its peers; no pod says why"
    return Finding(cause=cause, message=message, node=pod.node, explained=False)


def _check_deleted(pods: tuple[Pod, ...]) -> Finding | None:
    pod = _first(pod for pod in pods if was_killed(pod))
    if pod is None:
        return None
    return Finding(cause=Cause.REQUESTED, message=f"pod {pod.name} was deleted", node=pod.node)


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
