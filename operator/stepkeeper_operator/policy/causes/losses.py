"""Attribute an end to the loss of the job's machines."""

from dataclasses import replace
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.policy.causes.finding import CAUSE_DISRUPTION, Finding, Verdict
from stepkeeper_operator.policy.machines import MachinesLoss
from stepkeeper_operator.policy.pod_ends import tells_own_limits

__all__ = ["attribute_to_loss"]

_BY_LOSS: Final = {
    Cause.NODE_FAILURE,
    Cause.EVICTION,
    Cause.REQUESTED,
    Cause.APPLICATION_ERROR,
    CAUSE_DISRUPTION,
}
"""Causes that ends of pods give when their machines are taken away; those whose peers are gone fail on their own."""


def attribute_to_loss(finding: Finding, loss: MachinesLoss | None) -> Finding:
    """Give an end that the loss of the job's machines explains the cause of that loss."""
    if loss is None or finding.verdict is not Verdict.RESTART or tells_own_limits(finding.message):
        return finding
    if finding.explained and finding.cause not in _BY_LOSS:
        return finding
    return replace(finding, cause=loss.cause, message=f"{finding.message}; {loss.message}", explained=True)
