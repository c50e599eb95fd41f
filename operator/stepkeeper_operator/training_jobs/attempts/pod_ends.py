"""Find out from a pod how its containers ended, and describe it."""

from collections.abc import Iterable
from typing import Final

from stepkeeper.contract import ExitCode, NoticeSource
from stepkeeper_operator.facts import Pod

__all__ = [
    "describe_eviction",
    "describe_failure",
    "describe_other_failure",
    "ended_by_deletion",
    "ended_by_signal",
    "heard_only_of_peers",
    "is_masked",
    "last_error_line",
    "ran_out_of_memory",
    "said_done",
    "stopped_with_0",
    "was_killed",
    "was_stopped",
]

_SIGNAL_CODES: Final = frozenset({137, 143})
"""Exit codes of programs that SIGKILL or SIGTERM ended."""

_OWN_WORDS: Final = {None, "Error"}
"""Reasons of a container's end that add nothing to the exit code: it is the program's own."""

_OOM_KILLED: Final = "OOMKilled"
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
    but after its end. Programs that are ended by SIGTERM exit with codes of their own, too.
    """
    if pod.deadline is None or reason == _OOM_KILLED:
        return False
    if finished_at is None:
        return code in _SIGNAL_CODES
    late_s = finished_at - (pod.deadline - pod.grace_s)
    return late_s >= -_CLOCK_SKEW_S if code in _SIGNAL_CODES else late_s >= 0 and reason in _OWN_WORDS


def was_stopped(pod: Pod) -> bool:
    """Return True if the pod's trainer ended after its deletion was asked for, and nothing else ended it."""
    if pod.deadline is None or pod.disruption is not None or pod.hang:
        return False
    return pod.finished_at is None or pod.finished_at >= pod.deadline - pod.grace_s - _CLOCK_SKEW_S


def ended_by_signal(pod: Pod) -> bool:
    """Return True if a signal ended the pod's trainer: its code is none of its own."""
    return pod.code in _SIGNAL_CODES


def ran_out_of_memory(pod: Pod) -> bool:
    return pod.exit_reason == _OOM_KILLED


def heard_only_of_peers(pods: Iterable[Pod]) -> bool:
    """Return True if pods name each other as the source of their notice, and none knows more."""
    messages = [pod.termination for pod in pods if pod.termination is not None]
    notices = {message.notice for message in messages}
    by_peers = NoticeSource.PEER in notices <= {NoticeSource.PEER, None}
    return by_peers and all(message.cause is None for message in messages)


def stopped_with_0(pod: Pod) -> bool:
    """Return True if the pod's program, asked to stop, exited 0 without a message of ours: it may be far from done."""
    asked = pod.disruption is not None or was_stopped(pod)
    return asked and pod.exit_code == 0 and pod.termination is None


def is_masked(pod: Pod) -> bool:
    """Return True if the pod exited 0 though its training reported another code: a shell or a launcher hides it."""
    return pod.exit_code == ExitCode.DONE and pod.code != ExitCode.DONE


def said_done(pod: Pod) -> bool:
    """Return True if the trainer exited 0 and reported that the training is done, with no notice before that."""
    message = pod.termination
    done = message is not None and message.code == ExitCode.DONE and message.notice is None
    return pod.exit_code == 0 and done


def describe_failure(pod: Pod) -> str:
    """Describe how the trainer failed: its exit code, and the last line of its error or the end of its log."""
    text = f"pod {pod.name} exited with code {pod.code}"
    if is_masked(pod):
        text = f"the training of pod {pod.name} ended with code {pod.code}, and its container exited 0"
    if ran_out_of_memory(pod):
        text += f" ({_OOM_KILLED}: it used more memory than its limit)"
    detail = last_error_line(pod) or pod.last_words
    return f"{text}: {detail}" if detail else text


def describe_other_failure(pod: Pod) -> str:
    """Describe how another container than the trainer failed: its exit code, the kubelet's reason, its last words."""
    other = pod.other_failure
    assert other is not None  # the caller has looked at it
    text = f"container {other.name!r} of pod {pod.name} exited with code {other.code}"
    why = f" ({other.reason})" if other.reason not in _OWN_WORDS else ""
    detail = f": {other.last_words}" if other.last_words else ""
    return text + why + detail


def describe_eviction(pod: Pod) -> str:
    """Describe how the pod went over its own limits."""
    why = pod.message or "it used more ephemeral storage, or of an emptyDir, than its limit"
    return f"pod {pod.name} was evicted by its kubelet: {why}"


def last_error_line(pod: Pod) -> str:
    error = pod.termination.error if pod.termination is not None else None
    return error.strip().splitlines()[-1] if error and error.strip() else ""
