"""Judge why an attempt ended. Rules are tried in order; the first one that finds a cause decides.

Disruptions come before failures: the survivors of a disruption fail soon after it and are observed first.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from stepkeeper.contract import FENCED, AttemptKind, Cause, ExitCode, NoticeSource, Verdict, judge_exit
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.labels import NODE_LOST_REASON
from stepkeeper_operator.training_jobs.attempts.evidence import Evidence
from stepkeeper_operator.training_jobs.attempts.machines import MachinesLoss
from stepkeeper_operator.training_jobs.attempts.pod_ends import (
    describe_failure,
    describe_limit,
    describe_other_failure,
    ended_by_deletion,
    ended_by_signal,
    exceeded_its_limits,
    explain_end,
    failed_probe,
    find_error_line,
    notified_only_by_peers,
    ran_out_of_memory,
    reported_done,
    was_killed,
    was_stopped,
)
from stepkeeper_operator.training_jobs.build.failure_policy import RULE_DISRUPTION, RULE_HANG, RULE_SAVED

__all__ = ["attribute_to_loss", "judge"]

_BY_SCHEDULER: Final = "PreemptionByScheduler"
_BY_REASON: Final = {
    _BY_SCHEDULER: Cause.SCHEDULER_PREEMPTION,
    "EvictionByEvictionAPI": Cause.EVICTION,
    "DeletionByTaintManager": Cause.NODE_FAILURE,
    "DeletionByPodGC": Cause.NODE_FAILURE,
    NODE_LOST_REASON: Cause.NODE_FAILURE,
}
_BY_KUBELET: Final = "TerminationByKubelet"
"""The kubelet ends pods when their node shuts down, and evicts pods."""

_EVICTED: Final = "Evicted"
_SHUTDOWN_REASONS: Final = {"NodeShutdown", "Terminated", "Shutdown"}
_MADE_UP_REASONS: Final = {"Unknown", "ContainerStatusUnknown"}
"""The kubelet's reasons for the end of a container whose real end it did not observe."""

_ANNOUNCED: Final = {Cause.SPOT_PREEMPTION, Cause.MAINTENANCE}
"""The causes that the cloud announces on the machine itself."""

_BY_RULE: Final = {RULE_HANG: Cause.HANG, RULE_DISRUPTION: Cause.DISRUPTION, RULE_SAVED: Cause.REQUESTED}
_NO_FAILURES: Final = {ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER_LOST}
_BY_LOSS: Final = {
    Cause.NODE_FAILURE,
    Cause.EVICTION,
    Cause.REQUESTED,
    Cause.APPLICATION_ERROR,
    Cause.DISRUPTION,
}
"""Causes that ends of pods show when their machines, or those of their peers, are taken away."""


def judge(evidence: Evidence) -> Verdict:
    """Find the best explanation of the end."""
    evidence = replace(evidence, pods=tuple(sorted(evidence.pods, key=_end_order)))
    found = next((verdict for rule in _RULES if (verdict := rule(evidence)) is not None), None)
    return attribute_to_loss(found or _infer_from_jobset(evidence), evidence.loss)


def _end_order(pod: Pod) -> tuple[float, tuple[int, int]]:
    """Return the sort key by which the pods are ordered by their end, those that have not ended last."""
    return (float("inf") if pod.finished_at is None else pod.finished_at, pod.rank)


def _completed(evidence: Evidence) -> Verdict | None:
    """Check that every trainer exited 0 and reported that the training is done, whatever other containers did.

    The newest pod of each rank counts, also of ranks that a later edit of the number of hosts removed.
    """
    newest = {pod.rank: pod for pod in sorted(evidence.pods, key=lambda pod: pod.created_at)}
    if len(newest) < evidence.n_hosts or not all(map(reported_done, newest.values())):
        return None
    text = "every trainer exited 0 and reported that the training is done"
    others = [describe_other_failure(pod) for pod in evidence.pods if pod.other_failure is not None]
    return Verdict(kind=AttemptKind.COMPLETED, cause=None, message="; ".join([text, *others[:1]]))


def _fenced(evidence: Evidence) -> Verdict | None:
    """Find a trainer that reported that another claim owns the root."""
    for pod in evidence.pods:
        if pod.code == ExitCode.FENCED and pod.disruption is None:
            detail = find_error_line(pod) or "the storage log names another claim"
            text = f"pod {pod.name} found that another claim owns the checkpoint root: {detail}"
            return _blame(FENCED, pod, text)
    return None


def _hung(evidence: Evidence) -> Verdict | None:
    """Find a pod that was ended because it made no progress."""
    pod = next((pod for pod in evidence.pods if pod.hang is not None), None)
    return None if pod is None else _blame(Cause.HANG, pod, f"pod {pod.name} made no progress: {pod.hang}")


def _disrupted(evidence: Evidence) -> Verdict | None:
    """Find a pod that the cluster ended, or whose node was lost or restarted."""
    for pod in evidence.pods:
        cause = _classify_disruption(pod, evidence)
        # A pod can have condition DisruptionTarget before it is deleted.
        if cause is not None and (pod.deletion_requested_at is not None or pod.terminal):
            text = f"pod {pod.name} was ended by {pod.disruption or pod.reason} on node {pod.node}"
            return _blame(cause, pod, text)
    for pod in evidence.pods:
        node = evidence.nodes.get(pod.node or "")
        if not pod.terminal and pod.exit_code is None and node is not None and node.lost:
            return _blame(Cause.NODE_FAILURE, pod, f"node {node.name} was lost with pod {pod.name} on it")
    for pod in evidence.pods:
        # A restarted node reports only that its containers are gone.
        made_up = pod.exit_reason in _MADE_UP_REASONS and pod.exit_code is not None
        if made_up and pod.termination is None and not was_killed(pod):
            text = f"node {pod.node} restarted or lost track of pod {pod.name} ({pod.exit_reason})"
            return _blame(Cause.NODE_FAILURE, pod, text)
    return None


def _classify_disruption(pod: Pod, evidence: Evidence) -> str | None:
    if pod.disruption == _BY_KUBELET and pod.reason == _EVICTED:
        return Cause.EVICTION
    shuts_down = pod.disruption == _BY_KUBELET or (pod.disruption is None and pod.reason in _SHUTDOWN_REASONS)
    if not shuts_down and pod.disruption is None:
        return None
    announced = None if pod.termination is None else pod.termination.cause
    if announced in _ANNOUNCED and pod.disruption != _BY_SCHEDULER:
        # The cloud announces the reason to its machines; Kubernetes reports only how the pod ended.
        return announced
    if shuts_down:
        node = evidence.nodes.get(pod.node or "")
        on_spot = evidence.on_spot if node is None else node.spot
        return Cause.SPOT_PREEMPTION if on_spot else Cause.MAINTENANCE
    return _BY_REASON.get(pod.disruption or "", Cause.DISRUPTION)


def _over_its_limits(evidence: Evidence) -> Verdict | None:
    """Find a pod that its kubelet ended for the pod's own limits, not for a shortage on the node."""
    for pod in evidence.pods:
        if exceeded_its_limits(pod):
            verdict = _blame(Cause.APPLICATION_ERROR, pod, describe_limit(pod))
            return replace(verdict, kind=AttemptKind.OVER_LIMITS)
    return None


def _failed_first(evidence: Evidence) -> Verdict | None:
    """Find a trainer that failed while the others saved and stopped because of that.

    Either their Job deleted them. Or they notified each other: a launcher stops its processes after a failure on
    another host, without a notice from the cluster.
    """
    saved = [pod for pod in evidence.pods if pod.code == ExitCode.SAVED]
    if not saved:
        return None
    if all(map(was_stopped, saved)):
        return _failed(evidence)
    by_peers = evidence.notice in {None, NoticeSource.PEER} and notified_only_by_peers(evidence.pods)
    # A launcher ends its processes by signals, so only a pod that ended otherwise has failed first.
    failed = [pod for pod in _list_failed(evidence) if not ended_by_signal(pod) or ran_out_of_memory(pod)]
    return _blame_first(failed, evidence) if by_peers and failed else None


def _saved_and_stopped(evidence: Evidence) -> Verdict | None:
    """Find pods that saved and stopped. The one with the most specific reason decides."""
    stopped = [pod for pod in evidence.pods if pod.code == ExitCode.SAVED]
    if not stopped:
        return None
    pod = min(stopped, key=_reason_order)
    message = pod.termination
    notice = (None if message is None else message.notice) or evidence.notice
    cause = judge_exit(ExitCode.SAVED, message, has_committed=evidence.has_committed)
    why = f"after notice {notice!r}" if notice else "without a known notice"
    text = f"pod {pod.name} stopped with exit code {ExitCode.SAVED.value} {why}{explain_end(pod)}"
    if failed_probe(pod):
        return _blame(Cause.HANG, pod, text)
    by_sigterm = notice == NoticeSource.SIGTERM and cause == Cause.REQUESTED and not was_stopped(pod)
    if evidence.maintenance is not None and by_sigterm:
        # The pod was not deleted, so the machine sent the signal.
        verdict = _blame(evidence.maintenance.cause, pod, f"{text}; {evidence.maintenance.message}")
        return replace(verdict, kind=AttemptKind.MACHINES_UNAVAILABLE)
    committed = evidence.has_committed or (message is not None and message.committed is not None)
    return replace(_blame(cause, pod, text), inferred=notice is None and not committed)


def _reason_order(pod: Pod) -> int:
    """Return the sort key that puts the pod with the most specific reason first."""
    message = pod.termination
    if failed_probe(pod):
        return 0
    if message is None:
        return 3
    if message.cause is not None:
        return 0
    return 2 if message.notice in {None, NoticeSource.PEER} else 1


def _failed(evidence: Evidence) -> Verdict | None:
    """Find a container that failed by itself, a pod that never ran, or pods that report only lost peers."""
    if failed := _list_failed(evidence):
        return _blame_first(failed, evidence)
    return _blame_other_container(evidence) or _blame_never_started(evidence) or _blame_lost_peers(evidence)


def _list_failed(evidence: Evidence) -> list[Pod]:
    """List the pods whose trainers failed by themselves, including a deleted pod with a fatal exit code."""
    codes = evidence.fatal_codes
    return [
        pod
        for pod in evidence.pods
        if pod.code is not None
        and pod.code not in _NO_FAILURES
        and (not was_killed(pod) or (pod.code in codes and not ended_by_signal(pod)))
    ]


def _blame_first(failed: list[Pod], evidence: Evidence) -> Verdict:
    fatal = next((pod for pod in failed if pod.code in evidence.fatal_codes), None)
    if fatal is not None:
        verdict = _blame(Cause.APPLICATION_ERROR, fatal, describe_failure(fatal))
        return replace(verdict, kind=AttemptKind.UNRECOVERABLE)
    for pod in failed:
        cause = judge_exit(pod.code, pod.termination, has_committed=evidence.has_committed)
        if cause == Cause.STORAGE_UNAVAILABLE:
            # The other failures follow from this one.
            return _blame(Cause.STORAGE_UNAVAILABLE, pod, describe_failure(pod))
    first = failed[0]
    verdict = _blame(Cause.APPLICATION_ERROR, first, describe_failure(first))
    return replace(verdict, kind=AttemptKind.OVER_LIMITS) if ran_out_of_memory(first) else verdict


def _blame_other_container(evidence: Evidence) -> Verdict | None:
    """Blame an init container or sidecar, which belong to the application."""
    for pod in evidence.pods:
        other = pod.other_failure
        alone = pod.phase == "Failed" and pod.code in {None, ExitCode.DONE}
        if other is None or not alone or ended_by_deletion(pod, other.code, other.reason, other.finished_at):
            continue
        return _blame(Cause.APPLICATION_ERROR, pod, describe_other_failure(pod))
    return None


def _blame_never_started(evidence: Evidence) -> Verdict | None:
    for pod in evidence.pods:
        if pod.phase == "Failed" and pod.exit_code is None and pod.other_failure is None:
            text = f"pod {pod.name} failed without an exit code ({pod.reason or 'no reason given'})"
            return replace(_blame(Cause.NODE_FAILURE, pod, text), inferred=True)
    return None


def _blame_lost_peers(evidence: Evidence) -> Verdict | None:
    pod = next((pod for pod in evidence.pods if pod.code == ExitCode.PEER_LOST), None)
    if pod is None:
        return None
    text = f"pod {pod.name} lost its peers; no pod reported the cause"
    if detail := find_error_line(pod) or pod.log_tail:
        text += f": {detail}"
    cause = judge_exit(ExitCode.PEER_LOST, pod.termination, has_committed=evidence.has_committed)
    return replace(_blame(cause, pod, text), inferred=True)


def _deleted(evidence: Evidence) -> Verdict | None:
    """Find a pod that was deleted."""
    pod = next((pod for pod in evidence.pods if was_killed(pod)), None)
    return None if pod is None else _blame(Cause.REQUESTED, pod, f"pod {pod.name} was deleted")


def _named_by_job(evidence: Evidence) -> Verdict | None:
    """Find a failed Job that names a fatal exit code."""
    for message in evidence.job_messages:
        fenced = f"exit code {ExitCode.FENCED.value} " in message
        if fenced or any(f"exit code {code} " in message for code in evidence.fatal_codes):
            cause = FENCED if fenced else Cause.APPLICATION_ERROR
            return Verdict(kind=AttemptKind.UNRECOVERABLE, cause=cause, message=message)
    return None


_RULES: Final[tuple[Callable[[Evidence], Verdict | None], ...]] = (
    _completed,
    _fenced,
    _hung,
    _disrupted,
    _over_its_limits,
    _failed_first,
    _saved_and_stopped,
    _failed,
    _deleted,
    _named_by_job,
)


def _infer_from_jobset(evidence: Evidence) -> Verdict:
    """Infer the cause of an unobserved end from JobSet's reaction."""
    if evidence.counted is None and evidence.rule is None:
        cause, text = Cause.REQUESTED, "its end was not observed"
    elif evidence.counted:
        cause = Cause.APPLICATION_ERROR
        text = "its end was not observed; JobSet counted an application failure"
    else:
        cause = _BY_RULE.get(evidence.rule or "", Cause.DISRUPTION)
        cause = Cause.SPOT_PREEMPTION if cause == Cause.DISRUPTION and evidence.on_spot else cause
        text = "its end was not observed; JobSet counted no application failure"
    return Verdict(kind=AttemptKind.of(cause), cause=cause, message=text, inferred=True)


def attribute_to_loss(verdict: Verdict, loss: MachinesLoss | None) -> Verdict:
    """Replace the cause of an end by the cause of the machines' loss, if the loss explains the end."""
    by_itself = verdict.kind in {AttemptKind.COMPLETED, AttemptKind.UNRECOVERABLE, AttemptKind.OVER_LIMITS}
    if loss is None or by_itself or not (verdict.inferred or verdict.cause in _BY_LOSS):
        return verdict
    text, kind = f"{verdict.message}; {loss.message}", AttemptKind.MACHINES_UNAVAILABLE
    return Verdict(kind=kind, cause=loss.cause, message=text, node=verdict.node)


def _blame(cause: str, pod: Pod, message: str) -> Verdict:
    return Verdict(kind=AttemptKind.of(cause), cause=cause, message=message, node=pod.node)
