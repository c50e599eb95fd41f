"""Classify and describe how the containers of a pod ended."""

from collections.abc import Iterable
from signal import Signals
from typing import Final

from stepkeeper.contract import CONTAINER_NAME, ExitCode, NoticeSource
from stepkeeper_operator.facts.pod import Pod

__all__ = [
    "describe_failure",
    "describe_limit",
    "describe_other_failure",
    "ended_by_deletion",
    "ended_by_signal",
    "exceeded_its_limits",
    "exit_code_was_hidden",
    "explain_end",
    "failed_probe",
    "find_error_line",
    "notified_only_by_peers",
    "ran_out_of_memory",
    "reported_done",
    "stopped_with_0",
    "was_killed",
    "was_stopped",
]

_SIGNAL_CODES: Final = frozenset({137, 143})
"""Exit codes of programs that were ended by SIGKILL or SIGTERM."""

_PLAIN_REASONS: Final = {None, "Error"}
"""Reasons of a container's end that add nothing to its exit code: the program itself chose the code."""

_OOM_KILLED: Final = "OOMKilled"
_EVICTED: Final = "Evicted"
_DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
_BY_SIGNAL: Final = 128
"""Added to the number of a signal, it is the exit code of a container that the signal ended."""

_CLOCK_SKEW_S: Final = 1
"""The pod's end uses the node's clock, the request for its deletion the API server's."""


def was_killed(pod: Pod) -> bool:
    """Return True if the pod's deletion ended its trainer, or another container before the trainer had ended."""
    other = pod.other_failure
    if pod.code is None:
        return other is not None and ended_by_deletion(pod, other.code, other.reason, other.finished_at)
    return ended_by_deletion(pod, pod.code, pod.exit_reason, pod.finished_at)


def ended_by_deletion(pod: Pod, code: int, reason: str | None, finished_at: float | None) -> bool:
    """Return True if a container ended because its pod was deleted, by its Job or by a user.

    A Job deletes its pods after one of them has failed. A pod that ended by itself is deleted too, but after its end.
    Programs that are ended by SIGTERM may also exit with their own codes.
    """
    requested_at, by_signal = pod.deletion_requested_at, code in _SIGNAL_CODES
    if requested_at is None or reason == _OOM_KILLED:
        return False
    if by_signal:
        return finished_at is None or finished_at >= requested_at - _CLOCK_SKEW_S
    return finished_at is not None and finished_at >= requested_at and reason in _PLAIN_REASONS


def was_stopped(pod: Pod) -> bool:
    """Return True if the pod's trainer ended after the pod's deletion was requested, and nothing else ended it."""
    if pod.deletion_requested_at is None or pod.disruption is not None or pod.hang is not None:
        return False
    return pod.finished_at is None or pod.finished_at >= pod.deletion_requested_at - _CLOCK_SKEW_S


def ended_by_signal(pod: Pod) -> bool:
    """Return True if a signal ended the pod's trainer."""
    return pod.code in _SIGNAL_CODES


def ran_out_of_memory(pod: Pod) -> bool:
    return pod.exit_reason == _OOM_KILLED


def exceeded_its_limits(pod: Pod) -> bool:
    """Return True if the kubelet evicted the pod for its usage of disk, or killed it at its activeDeadlineSeconds."""
    evicted = pod.reason == _EVICTED and pod.disruption is None
    killed = pod.code in {None, ExitCode.DONE} or ended_by_signal(pod)
    return pod.terminal and (evicted or (pod.reason == _DEADLINE_EXCEEDED and killed))


def failed_probe(pod: Pod, container: str = CONTAINER_NAME) -> bool:
    """Return True if the kubelet ended the container because one of its probes failed."""
    return pod.failed_probe.startswith(f"Container {container} ")


def notified_only_by_peers(pods: Iterable[Pod]) -> bool:
    """Return True if at least one pod names a peer as the source of its notice, and none another source or a cause."""
    messages = [pod.termination for pod in pods if pod.termination is not None]
    notices = {message.notice for message in messages}
    by_peers = NoticeSource.PEER in notices <= {NoticeSource.PEER, None}
    return by_peers and all(message.cause is None for message in messages)


def stopped_with_0(pod: Pod) -> bool:
    """Return True if the pod's program was asked to stop and exited 0 without a termination message of the runtime."""
    asked = pod.disruption is not None or pod.hang is not None or was_stopped(pod)
    return asked and pod.exit_code == 0 and pod.termination is None


def exit_code_was_hidden(pod: Pod) -> bool:
    """Return True if the pod exited 0 although its training reported another code, hidden by a shell or launcher."""
    return pod.exit_code == ExitCode.DONE and pod.code != ExitCode.DONE


def reported_done(pod: Pod) -> bool:
    """Return True if the trainer exited 0 and reported that the training is done, without an earlier notice."""
    message = pod.termination
    done = message is not None and message.code == ExitCode.DONE and message.notice is None
    return pod.exit_code == 0 and done


def describe_failure(pod: Pod) -> str:
    """Describe how the trainer failed: its exit code, and its error in one line or the end of its log."""
    text = f"pod {pod.name} exited with code {pod.code}"
    if exit_code_was_hidden(pod):
        text = f"the training of pod {pod.name} ended with code {pod.code}, but its container exited 0"
    detail = find_error_line(pod) or pod.log_tail
    return text + explain_end(pod) + (f": {detail}" if detail else "")


def explain_end(pod: Pod) -> str:
    """Return in parentheses what else than its program ended the trainer; empty if nothing is known."""
    return _explain(pod, CONTAINER_NAME, pod.exit_code or 0, pod.exit_reason)


def _explain(pod: Pod, container: str, code: int, reason: str | None) -> str:
    if reason == _OOM_KILLED:
        why: str | None = f"{_OOM_KILLED}: it used more memory than its limit"
    elif failed_probe(pod, container):
        why = pod.failed_probe
    elif pod.reason == _DEADLINE_EXCEEDED:
        why = f"{pod.reason}: {pod.message}"
    elif reason not in {*_PLAIN_REASONS, "Completed"}:
        why = reason
    else:
        why = next((signal.name for signal in Signals if signal == code - _BY_SIGNAL), None)
    return f" ({why})" if why else ""


def describe_other_failure(pod: Pod) -> str:
    """Describe how a container other than the trainer failed: exit code, kubelet's reason, and last output."""
    other = pod.other_failure
    assert other is not None  # the caller has checked it
    text = f"container {other.name!r} of pod {pod.name} exited with code {other.code}"
    detail = f": {other.log_tail}" if other.log_tail else ""
    return text + _explain(pod, other.name, other.code, other.reason) + detail


def describe_limit(pod: Pod) -> str:
    """Describe which of its own limits the pod exceeded."""
    if pod.reason == _DEADLINE_EXCEEDED:
        return f"pod {pod.name} was ended at its activeDeadlineSeconds: {pod.message}"
    why = pod.message or "it exceeded its limit of ephemeral storage or of an emptyDir"
    return f"pod {pod.name} was evicted by its kubelet: {why}"


def find_error_line(pod: Pod) -> str:
    return "" if pod.termination is None else pod.termination.error_line
