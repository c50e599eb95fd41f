"""Derive condition PodStuck: a pod outlives its grace period, and the job cannot start until it is gone.

Only a user can find out whether its program still runs, unless its node is lost.
"""

from functools import partial
from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, ConditionType, ConditionUpdate
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob_status import TrainingJobStatus
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.training_jobs.observed import Observed, View

__all__ = ["derive_stuck", "is_pod_stuck"]

_update: Final = partial(ConditionUpdate, ConditionType.POD_STUCK)
_OVERDUE_S: Final = 60
"""Seconds by which a pod may outlive its grace period while its kubelet or the operator ends it."""

_NAMED: Final = 3


def derive_stuck(view: View) -> tuple[tuple[ConditionUpdate, ...], float | None]:
    """Check for pods that do not end. A job that never had one lacks the condition.

    Returns:
        The condition, and the seconds until the next pod can be overdue; None if none can.

    """
    left = () if view.observed.leftover is None else view.observed.leftover.terminating
    pods = {pod.uid: pod for pod in (*left, *view.observed.pods)}.values()
    due = {pod.uid: pod.deadline + _OVERDUE_S for pod in pods if pod.deadline is not None}
    stuck = sorted(
        (pod for pod in pods if due.get(pod.uid, view.now + 1) <= view.now), key=lambda pod: due[pod.uid]
    )
    again_s = min((at - view.now for at in due.values() if at > view.now), default=None)
    if stuck:
        reason = _find_reason(stuck[0], view.observed)
        return (_update(reason, _describe(view, stuck), status=True),), again_s
    known = any(c.type == ConditionType.POD_STUCK for c in view.job.status.conditions)
    return ((_update(Reason.AS_EXPECTED, "", status=False),) if known else ()), again_s


def is_pod_stuck(status: TrainingJobStatus) -> bool:
    """Return True while the status reports a stuck pod."""
    kind = ConditionType.POD_STUCK
    return any(c.type == kind and c.status is ConditionStatus.TRUE for c in status.conditions)


def _find_reason(pod: Pod, observed: Observed) -> Reason:
    node = observed.nodes.get(pod.node or "")
    if node is None or node.gone_since is not None:
        return Reason.NODE_GONE
    if node.unknown_since is not None:
        return Reason.NODE_SILENT
    return Reason.STILL_TERMINATING if node.ready else Reason.NODE_NOT_READY


def _describe(view: View, stuck: list[Pod]) -> str:
    """Name the pods, their deadlines, and what to do. The text stays the same while nothing changes."""
    named = "; ".join(_describe_pod(pod, view.observed) for pod in stuck[:_NAMED])
    more = f"; and {len(stuck) - _NAMED} more" if len(stuck) > _NAMED else ""
    kubectl, name = f"kubectl -n {view.job.metadata.namespace}", stuck[0].name
    return (
        f"{named}{more}. The job cannot start meanwhile. For the cause, see its events and finalizers ({kubectl} "
        f"describe pod {name}) and the log of the node's kubelet: a process that cannot be killed, a volume, or a "
        "finalizer. Fix it, or restart the machine. Once none of the pod's processes is running: "
        f"{kubectl} delete pod {name} --grace-period=0 --force"
    )


def _describe_pod(pod: Pod, observed: Observed) -> str:
    assert pod.deadline is not None  # the caller selected by it
    requested_at, until = render_time(pod.deadline - pod.grace_s), render_time(pod.deadline)
    due = f"its deadline was {until}" + (f" (deletion requested at {requested_at})" if pod.grace_s else "")
    return f"pod {pod.name} on node {pod.node} has not ended: {due}, and {_describe_node(pod, observed)}"


def _describe_node(pod: Pod, observed: Observed) -> str:
    node = observed.nodes.get(pod.node or "")
    if node is None or node.gone_since is not None:
        return "that node does not exist"
    if node.unknown_since is None:
        return f"{node.name} is Ready" if node.ready else f"{node.name} is not Ready, but its kubelet reports"
    since = f"{node.name} has been silent since {render_time(node.unknown_since)}"
    if 2 * observed.n_unknown_nodes < observed.n_nodes:
        return f"{since}; the operator gives up the pod once its reports stop"
    silent = f"{observed.n_unknown_nodes} of {observed.n_nodes} nodes"
    return f"{since}; the operator gives up no pod while {silent} are silent"
