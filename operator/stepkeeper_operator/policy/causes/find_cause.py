"""Find why an attempt ended, from the evidence of its pods."""

from dataclasses import replace

from stepkeeper.contract import ExitCode
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.policy.causes.completion import check_done
from stepkeeper_operator.policy.causes.counts import check_job_message, guess_from_jobset
from stepkeeper_operator.policy.causes.decisions import add_decision
from stepkeeper_operator.policy.causes.disruptions import (
    check_disrupted,
    check_hang,
    check_node_lost,
    check_node_restarted,
)
from stepkeeper_operator.policy.causes.failures import (
    check_failed,
    check_failed_first,
    check_over_limits,
    check_peers_lost,
)
from stepkeeper_operator.policy.causes.finding import CAUSE_FENCED, Finding, Verdict
from stepkeeper_operator.policy.causes.losses import attribute_to_loss
from stepkeeper_operator.policy.causes.stops import check_deleted, check_saved
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.pod_ends import last_error_line

__all__ = ["find_cause"]


def find_cause(evidence: AttemptEvidence | None, circumstances: Circumstances) -> Finding:
    """Find the best explanation.

    Disruptions come before failures: survivors of a disruption fail soon after and are seen first.
    """
    pods = () if evidence is None else tuple(sorted(evidence.pods, key=_sort_key))
    finding = (
        check_done(pods, circumstances)
        or _check_fenced(pods)
        or check_hang(pods)
        or check_disrupted(pods, circumstances)
        or check_node_lost(pods, circumstances)
        or check_node_restarted(pods)
        or check_over_limits(pods)
        or check_failed_first(pods, circumstances)
        or check_saved(pods, circumstances)
        or check_failed(pods, circumstances)
        or check_peers_lost(pods, circumstances)
        or check_deleted(pods)
        or check_job_message(evidence, circumstances)
    )
    finding = finding or guess_from_jobset(circumstances)
    finding = replace(finding, message=add_decision(finding.message, pods))
    return attribute_to_loss(finding, circumstances.loss)


def _sort_key(pod: Pod) -> tuple[float, tuple[int, int]]:
    return (float("inf") if pod.finished_at is None else pod.finished_at, pod.rank)


def _check_fenced(pods: tuple[Pod, ...]) -> Finding | None:
    pod = next((pod for pod in pods if pod.code == ExitCode.FENCED and pod.disruption is None), None)
    if pod is None:
        return None
    detail = last_error_line(pod) or "the storage log names another claim"
    message = f"pod {pod.name} found that another claim owns the checkpoint root: {detail}"
    return Finding(cause=CAUSE_FENCED, message=message, node=pod.node, verdict=Verdict.FENCED)
