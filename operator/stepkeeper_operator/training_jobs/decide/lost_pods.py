"""Find pods that were lost with their node. Only the operator ends them, and JobSet would wait for them forever."""

from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.training_jobs.decision import GiveUpPod
from stepkeeper_operator.training_jobs.observed import Observed, View

__all__ = ["find_lost_pods"]

_LOOK_AGAIN_S = 5.0
_LIFE_S = 300.0
"""Seconds for which a sign of life counts. The training may have continued for a while before it stalled."""


def find_lost_pods(view: View) -> tuple[tuple[GiveUpPod, ...], float | None]:
    """Find the pods to fail and delete, and the seconds after which to look again.

    A pod is lost only if all of these hold:

    - Its deletion is overdue.
    - Its node is gone, or has been silent for as long as the pod's grace period.
    - The pod has not reported since, and no recent report has shown a new step of its attempt.
    - The operator has been running for a while.
    - Fewer than half of all nodes are silent: otherwise the control plane has lost contact.

    The pod's writer may still run; storage fences it.
    """
    observed = view.observed
    left = () if observed.leftover is None else observed.leftover.terminating
    known = {pod.uid: pod for pod in (*left, *observed.pods)}
    waiting = [
        pod
        for pod in known.values()
        if pod.deadline is not None and not _is_done(pod) and pod.node is not None
    ]
    if not waiting:
        return (), None
    up = view.now - observed.operator_started_at >= view.settings.lost_node_uptime_s
    outage = observed.n_nodes > 0 and 2 * observed.n_unknown_nodes >= observed.n_nodes
    lost = [pod for pod in waiting if up and _is_lost(pod, observed, view.now, outage=outage)]
    actions = tuple(GiveUpPod(pod=pod, message=_explain(pod, observed)) for pod in lost)
    return actions, _LOOK_AGAIN_S if len(lost) < len(waiting) else None


def _is_done(pod: Pod) -> bool:
    """Return True if nothing is left to do: its end is known, and its object disappears without its kubelet."""
    return pod.terminal and pod.grace_s == 0


def _is_lost(pod: Pod, observed: Observed, now: float, *, outage: bool) -> bool:
    assert pod.deadline is not None  # the caller selected by it
    if now <= pod.deadline:
        return False
    node = observed.nodes.get(pod.node or "")
    if node is None or node.gone_since is not None:
        return True  # all nodes are listed before the first decision
    if node.unknown_since is None or outage or now < node.unknown_since + pod.grace_s:
        return False
    return not _shows_life(pod, observed, since=max(node.unknown_since, now - _LIFE_S))


def _shows_life(pod: Pod, observed: Observed, *, since: float) -> bool:
    """Return True if the pod has reported since then, or its attempt has made a step.

    Reports of other hosts alone prove nothing: their companions keep reporting while the trainers wait for the lost
    pod. After a replacement of the pod, steps belong to the new pod.
    """
    report = observed.report
    if report is None or report.ordinal != pod.ordinal:
        return False
    evidence = observed.find_evidence(report.ordinal)
    known = () if evidence is None else evidence.pods
    replaced = any(other.rank == pod.rank and other.created_at > pod.created_at for other in known)
    reported_at, moved_at = report.reported_at.get(pod.uid), None if replaced else report.moved_at
    return any(at is not None and at >= since for at in (reported_at, moved_at))


def _explain(pod: Pod, observed: Observed) -> str:
    node = observed.nodes.get(pod.node or "")
    state = "is gone" if node is None or node.gone_since is not None else "does not report"
    return f"node {pod.node} {state} and the pod's deletion is overdue"
