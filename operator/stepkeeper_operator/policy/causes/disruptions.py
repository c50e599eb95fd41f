"""Find the disruption that ended an attempt, or who asked its pods to stop."""

from typing import Final

from stepkeeper.contract import Cause, ExitCode
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.labels import NODE_LOST_REASON
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.history import CAUSE_DISRUPTION, Finding
from stepkeeper_operator.policy.pod_ends import FROM_A_PEER, was_killed, was_stopped

__all__ = [
    "check_deleted",
    "check_disrupted",
    "check_hang",
    "check_node_lost",
    "check_node_restarted",
    "check_saved",
]

_BY_SCHEDULER: Final = "PreemptionByScheduler"
_BY_REASON: Final = {
    _BY_SCHEDULER: Cause.SCHEDULER_PREEMPTION,
    "EvictionByEvictionAPI": Cause.EVICTION,
    "DeletionByTaintManager": Cause.NODE_FAILURE,
    "DeletionByPodGC": Cause.NODE_FAILURE,
    NODE_LOST_REASON: Cause.NODE_FAILURE,
}
_BY_KUBELET: Final = "TerminationByKubelet"
_EVICTED: Final = "Evicted"
_SHUTDOWN_REASONS: Final = {"NodeShutdown", "Terminated", "Shutdown"}
_CLOUDS: Final = {Cause.SPOT_PREEMPTION, Cause.MAINTENANCE}
"""The causes that the cloud announces to a machine itself."""

_MADE_UP: Final = {"Unknown", "ContainerStatusUnknown"}

_SIGTERM: Final = "sigterm"
"""The notice that a pod names whose process was told to end."""


def check_hang(pods: tuple[Pod, ...]) -> Finding | None:
    """Check for a pod that was ended because it made no progress."""
    pod = next((pod for pod in pods if pod.hang), None)
    if pod is None:
        return None
    return Finding(cause=Cause.HANG, message=f"pod {pod.name} made no progress", node=pod.node)


def check_disrupted(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    """Check for a pod that the cluster has ended, or is ending."""
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


def check_node_lost(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    """Check for a pod without an end whose node is lost."""
    for pod in pods:
        node = circumstances.nodes.get(pod.node or "")
        if not pod.terminal and pod.exit_code is None and node is not None and node.lost:
            message = f"node {node.name} was lost with pod {pod.name} on it"
            return Finding(cause=Cause.NODE_FAILURE, message=message, node=node.name)
    return None


def check_node_restarted(pods: tuple[Pod, ...]) -> Finding | None:
    """Check for a node that restarted: it knows only that its containers are gone, and makes up their exit codes."""
    for pod in pods:
        made_up = pod.exit_reason in _MADE_UP and pod.termination is None and pod.exit_code is not None
        if made_up and not was_killed(pod):
            message = f"node {pod.node} restarted or lost track of pod {pod.name} ({pod.exit_reason})"
            return Finding(cause=Cause.NODE_FAILURE, message=message, node=pod.node)
    return None


def check_saved(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    """Check for pods that saved and stopped, and for who asked them to."""
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


def check_deleted(pods: tuple[Pod, ...]) -> Finding | None:
    """Check for a pod that somebody deleted."""
    pod = next((pod for pod in pods if was_killed(pod)), None)
    if pod is None:
        return None
    return Finding(cause=Cause.REQUESTED, message=f"pod {pod.name} was deleted", node=pod.node)
