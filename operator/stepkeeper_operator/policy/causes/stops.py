"""Find who asked the pods of an attempt to stop: they saved, or were deleted."""

from typing import Final

from stepkeeper.contract import Cause, ExitCode
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.policy.causes.finding import Finding
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.pod_ends import FROM_A_PEER, was_killed, was_stopped

__all__ = ["check_deleted", "check_saved"]

_SIGTERM: Final = "sigterm"
"""The notice that a pod names whose process was told to end."""


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
