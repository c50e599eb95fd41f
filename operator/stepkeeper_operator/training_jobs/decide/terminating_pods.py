"""Judge the pods whose deletion was requested: give up those that were lost with their node, and report the stuck.

No kubelet ends a lost pod, so the operator does: JobSet would wait for it forever. A stuck pod is overdue on any node.
Condition PodStuck names it, since the job cannot start before it is gone, and only a user can end it.
"""

from functools import partial
from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, ConditionType, ConditionUpdate
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob_status import TrainingJobStatus
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.training_jobs.decision import GiveUpPod
from stepkeeper_operator.training_jobs.observed import Observed, View

__all__ = ["derive_stuck", "find_lost_pods", "is_pod_stuck"]

_LOOK_AGAIN_S: Final = 5.0
_LIFE_S = 300.0
"""Seconds for which a report or step shows that the pod lives. A training may report for a while before it stalls."""

_update: Final = partial(ConditionUpdate, ConditionType.POD_STUCK)
_OVERDUE_S: Final = 60
"""Seconds by which a pod may outlive its grace period while its kubelet or the operator ends it."""

_MAX_NAMED: Final = 3
"""The number of stuck pods that a message names."""


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
    # A pod that was never on a node needs no kubelet to disappear, nor does one that has ended and has no grace left.
    on_nodes = [pod for pod in _list_terminating(observed) if pod.node is not None]
    waiting = [pod for pod in on_nodes if not (pod.terminal and pod.grace_s == 0)]
    if not waiting:
        return (), None
    ready = view.now - observed.operator_started_at >= view.settings.lost_node_uptime_s
    outage = observed.n_nodes > 0 and 2 * observed.n_unknown_nodes >= observed.n_nodes
    lost = [pod for pod in waiting if ready and _is_lost(pod, observed, view.now, outage=outage)]
    actions = tuple(GiveUpPod(pod=pod, message=_explain(pod, observed)) for pod in lost)
    return actions, _LOOK_AGAIN_S if len(lost) < len(waiting) else None


def _is_lost(pod: Pod, observed: Observed, now: float, *, outage: bool) -> bool:
    assert pod.deadline is not None  # the caller selected by it
    if now <= pod.deadline:
        return False
    node = _find_node(pod, observed)
    if node is None:
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
    pods = () if evidence is None else evidence.pods
    replaced = any(other.rank == pod.rank and other.created_at > pod.created_at for other in pods)
    signs = (report.reported_at.get(pod.uid), None if replaced else report.moved_at)
    return any(at is not None and at >= since for at in signs)


def _explain(pod: Pod, observed: Observed) -> str:
    state = "is gone" if _find_node(pod, observed) is None else "does not report"
    return f"node {pod.node} {state} and the pod's deletion is overdue"


def derive_stuck(view: View) -> tuple[tuple[ConditionUpdate, ...], float | None]:
    """Check for stuck pods, and return the seconds until the next pod can be stuck, if one can.

    A job that never had one lacks the condition.
    """
    limits = [((pod.deadline or 0.0) + _OVERDUE_S, pod) for pod in _list_terminating(view.observed)]
    limits.sort(key=lambda each: each[0])
    stuck = [pod for at, pod in limits if at <= view.now]
    again_s = min((at - view.now for at, _ in limits if at > view.now), default=None)
    if stuck:
        reason = _find_reason(stuck[0], view.observed)
        return (_update(reason, _describe(view, stuck), status=True),), again_s
    was_reported = any(c.type == ConditionType.POD_STUCK for c in view.job.status.conditions)
    return ((_update(Reason.AS_EXPECTED, "", status=False),) if was_reported else ()), again_s


def is_pod_stuck(status: TrainingJobStatus) -> bool:
    """Return True while the status reports a stuck pod."""
    kind = ConditionType.POD_STUCK
    return any(c.type == kind and c.status is ConditionStatus.TRUE for c in status.conditions)


def _find_reason(pod: Pod, observed: Observed) -> Reason:
    node = _find_node(pod, observed)
    if node is None:
        return Reason.NODE_GONE
    if node.unknown_since is not None:
        return Reason.NODE_SILENT
    return Reason.STILL_TERMINATING if node.ready else Reason.NODE_NOT_READY


def _describe(view: View, stuck: list[Pod]) -> str:
    """Name the pods, their deadlines, and what to do. The text stays the same while nothing changes."""
    named = "; ".join(_describe_pod(pod, view.observed) for pod in stuck[:_MAX_NAMED])
    more = f"; and {len(stuck) - _MAX_NAMED} more" if len(stuck) > _MAX_NAMED else ""
    kubectl, name = f"kubectl -n {view.job.metadata.namespace}", stuck[0].name
    return (
        f"{named}{more}. The job cannot start meanwhile. For the cause, see its events and finalizers ({kubectl} "
        f"describe pod {name}) and the log of the node's kubelet: a process that cannot be killed, a volume, or a "
        "finalizer. Fix it, or restart the machine. Once none of the pod's processes is running: "
        f"{kubectl} delete pod {name} --grace-period=0 --force"
    )


def _describe_pod(pod: Pod, observed: Observed) -> str:
    requested_at, until = render_time(pod.deletion_requested_at or 0), render_time(pod.deadline or 0)
    due = f"its deadline was {until}" + (f" (deletion requested at {requested_at})" if pod.grace_s else "")
    return f"pod {pod.name} on node {pod.node} has not ended: {due}, and {_describe_node(pod, observed)}"


def _describe_node(pod: Pod, observed: Observed) -> str:
    node = _find_node(pod, observed)
    if node is None:
        return "that node does not exist"
    if node.unknown_since is None:
        return f"{node.name} is Ready" if node.ready else f"{node.name} is not Ready, but its kubelet reports"
    since = f"{node.name} has been silent since {render_time(node.unknown_since)}"
    if 2 * observed.n_unknown_nodes < observed.n_nodes:
        return f"{since}; the operator gives up the pod once its reports stop"
    silent = f"{observed.n_unknown_nodes} of {observed.n_nodes} nodes"
    return f"{since}; the operator gives up no pod while {silent} are silent"


def _list_terminating(observed: Observed) -> list[Pod]:
    """List the pods whose deletion was requested, including those that an earlier JobSet left."""
    left = () if observed.leftover is None else observed.leftover.terminating
    pods = {pod.uid: pod for pod in (*left, *observed.pods)}
    return [pod for pod in pods.values() if pod.deletion_requested_at is not None]


def _find_node(pod: Pod, observed: Observed) -> Node | None:
    """Find the pod's node; None: it is gone."""
    node = observed.nodes.get(pod.node or "")
    return None if node is None or node.gone_since is not None else node
