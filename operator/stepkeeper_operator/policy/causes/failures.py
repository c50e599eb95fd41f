"""Find the failure of the application that ended an attempt."""

from typing import Final

from stepkeeper.contract import Cause, ExitCode
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.history import Finding, Verdict
from stepkeeper_operator.policy.pod_ends import (
    FROM_A_PEER,
    SIGNAL_CODES,
    describe_eviction,
    describe_failure,
    describe_other_failure,
    died_of_signal,
    ended_by_deletion,
    last_error_line,
    only_peers_told,
    was_killed,
    was_stopped,
)

__all__ = ["check_failed", "check_failed_first", "check_over_limits", "check_peers_lost"]

_EVICTED: Final = "Evicted"


def check_failed_first(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    """Check for a failure that the other pods were stopped for: they save and exit 75 when their Job deletes them.

    Or when they hear of a stop from each other: a launcher stops its processes for a failure on another host, and that
    is no notice of the cluster's.
    """
    saved = [pod for pod in pods if pod.code == ExitCode.SAVED]
    if not saved:
        return None
    if all(was_stopped(pod) for pod in saved):
        return check_failed(pods, circumstances) or check_peers_lost(pods, circumstances)
    if circumstances.notice not in {None, FROM_A_PEER} or not only_peers_told(pods):
        return None
    own = [pod for pod in _find_guilty(pods, circumstances) if not died_of_signal(pod)]
    return _blame(own, circumstances) if own else None


def check_over_limits(pods: tuple[Pod, ...]) -> Finding | None:
    """Check for a pod that its kubelet evicted for what the pod itself used, and not for what its node lacks."""
    pod = next(
        (pod for pod in pods if pod.terminal and pod.reason == _EVICTED and pod.disruption is None), None
    )
    if pod is None:
        return None
    return Finding(cause=Cause.APPLICATION_ERROR, message=describe_eviction(pod), node=pod.node)


def check_failed(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    """Check for a trainer or another container that failed by itself, and for a pod that never ran."""
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
    fatal = next((pod for pod in guilty if pod.code in circumstances.fatal_codes), None)
    if fatal is None and (waited := next(filter(_lacked_storage, guilty), None)) is not None:
        return Finding(
            cause=Cause.STORAGE_UNAVAILABLE, message=describe_failure(waited), node=waited.node
        )  # what the others fail with comes of that
    pod = fatal or guilty[0]
    verdict = Verdict.RESTART if fatal is None else Verdict.FATAL
    return Finding(
        cause=Cause.APPLICATION_ERROR, message=describe_failure(pod), node=pod.node, verdict=verdict
    )


def _lacked_storage(pod: Pod) -> bool:
    """Tell whether the trainer said that it ended because its store gave no answer."""
    return pod.termination is not None and pod.termination.cause == Cause.STORAGE_UNAVAILABLE


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
        return Finding(cause=Cause.APPLICATION_ERROR, message=describe_other_failure(pod), node=pod.node)
    return None


def _check_never_ran(pods: tuple[Pod, ...]) -> Finding | None:
    pod = next(
        (
            pod
            for pod in pods
            if pod.phase == "Failed" and pod.exit_code is None and pod.other_failure is None
        ),
        None,
    )
    if pod is None:
        return None
    message = f"pod {pod.name} failed without an exit code ({pod.reason or 'no reason given'})"
    return Finding(cause=Cause.NODE_FAILURE, message=message, node=pod.node, explained=False)


def check_peers_lost(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    """Check for pods that say only that they have lost others."""
    pod = next((pod for pod in pods if pod.code == ExitCode.PEER_LOST), None)
    if pod is None:
        return None
    cause = Cause.NODE_FAILURE if circumstances.committed else Cause.APPLICATION_ERROR
    message = f"pod {pod.name} lost its peers; no pod says why"
    if detail := last_error_line(pod) or pod.last_words:
        message += f": {detail}"
    return Finding(cause=cause, message=message, node=pod.node, explained=False)
