"""Tell from a pod how its containers ended."""

from collections.abc import Iterable
from typing import Final

from stepkeeper.contract import ExitCode
from stepkeeper_operator.facts import Pod

__all__ = [
    "FROM_A_PEER",
    "SIGNAL_CODES",
    "describe_eviction",
    "describe_failure",
    "describe_other_failure",
    "died_of_signal",
    "ended_by_deletion",
    "is_masked",
    "last_error_line",
    "only_peers_told",
    "stopped_with_0",
    "tells_own_limits",
    "was_killed",
    "was_stopped",
]

FROM_A_PEER: Final = "peer"
"""The notice that a pod names which was told by another one."""

SIGNAL_CODES: Final = frozenset({137, 143})
"""Exit codes of programs that SIGKILL or SIGTERM ended."""

_OWN_WORDS: Final = {None, "Error"}
"""Reasons of a container's end that leave the exit code to tell why: it is the program's own."""

_OOM_KILLED: Final = "OOMKilled"
_OUT_OF_MEMORY: Final = "(OOMKilled: it used more memory than its limit)"
_EVICTED: Final = "was evicted by its kubelet: "
_CLOCK_SKEW_S: Final = 1
"""The pod's end has the node's clock, the request for its deletion has the API server's."""


def was_killed(pod: Pod) -> bool:
    """Return True if the pod's deletion ended its trainer, or another container before the trainer had ended."""
    other = pod.other_failure
    if pod.code is None:
        return other is not None and ended_by_deletion(pod, other.code, other.reason, other.finished_at)
    return ended_by_deletion(pod, pod.code, pod.exit_reason, pod.finished_at)


def ended_by_deletion(pod: Pod, code: int, reason: str | None, finished_at: float | None) -> bool:
    """Return True if a container ended because somebody deleted its pod.

    Its Job deletes it after another pod has failed, or a person does. A pod that ended by itself is deleted too,
    but after its end. Programs that are told to end by SIGTERM exit with codes of their own, too.
    """
    if pod.deadline is None or reason == _OOM_KILLED:
        return False
    if finished_at is None:
        return code in SIGNAL_CODES
    late_s = finished_at - (pod.deadline - pod.grace_s)
    return late_s >= -_CLOCK_SKEW_S if code in SIGNAL_CODES else late_s >= 0 and reason in _OWN_WORDS


def was_stopped(pod: Pod) -> bool:
    """Return True if the pod's trainer ended after its deletion was asked for, and nothing else ended it."""
    if pod.deadline is None or pod.disruption is not None or pod.hang:
        return False
    return pod.finished_at is None or pod.finished_at >= pod.deadline - pod.grace_s - _CLOCK_SKEW_S


def died_of_signal(pod: Pod) -> bool:
    """Return True if a signal ended the pod's trainer: it may have been told to stop, and have told the others."""
    return pod.code in SIGNAL_CODES and pod.exit_reason != _OOM_KILLED


def only_peers_told(pods: Iterable[Pod]) -> bool:
    """Return True if pods name each other as those that told them to stop, and none knows more."""
    said = [pod.termination for pod in pods if pod.termination is not None]
    notices = {word.notice for word in said}
    return FROM_A_PEER in notices <= {FROM_A_PEER, None} and all(word.cause is None for word in said)


def stopped_with_0(pod: Pod) -> bool:
    """Return True if the pod's program, told to stop, exited 0 without a word of ours: it may be far from done."""
    told = pod.disruption is not None or was_stopped(pod)
    return told and pod.exit_code == 0 and pod.termination is None


def is_masked(pod: Pod) -> bool:
    """Return True if the pod exited 0 though its training said another code: a shell or a launcher hides it."""
    return pod.exit_code == ExitCode.DONE and pod.code != ExitCode.DONE


def describe_failure(pod: Pod) -> str:
    """Describe how the trainer failed: its exit code, and the last line of its error or the end of its log."""
    text = f"pod {pod.name} exited with code {pod.code}"
    if is_masked(pod):
        text = f"the training of pod {pod.name} ended with code {pod.code}, and its container exited 0"
    if pod.exit_reason == _OOM_KILLED:
        text += f" {_OUT_OF_MEMORY}"
    detail = last_error_line(pod) or pod.last_words
    return f"{text}: {detail}" if detail else text


def describe_other_failure(pod: Pod) -> str:
    """Describe how another container than the trainer failed: its exit code, the kubelet's reason, its last words."""
    other = pod.other_failure
    assert other is not None  # the caller has looked at it
    text = f"container {other.name!r} of pod {pod.name} exited with code {other.code}"
    why = f" ({other.reason})" if other.reason not in _OWN_WORDS else ""
    said = f": {other.last_words}" if other.last_words else ""
    return text + why + said


def describe_eviction(pod: Pod) -> str:
    """Describe how the pod went over its own limits."""
    why = pod.message or "it used more ephemeral storage, or of an emptyDir, than its limit"
    return f"pod {pod.name} {_EVICTED}{why}"


def tells_own_limits(message: str) -> bool:
    """Return True for the message of an end by a pod's own limits.

    Such an end is the application's alone. Any other error may come of lost peers or chips, whatever its text is.
    """
    return _OUT_OF_MEMORY in message or _EVICTED in message


def last_error_line(pod: Pod) -> str:
    error = pod.termination.error if pod.termination is not None else None
    return error.strip().splitlines()[-1] if error and error.strip() else ""
