"""Check whether the machines of a job's QueuedResource explain the end of an attempt."""

from dataclasses import dataclass
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.facts.queued_resource import QueuedMachines
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.training_jobs.build.placement import AUTOCHECKPOINT_GRACE_S
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["MachinesLoss", "explain_loss", "find_maintenance"]

_CLOCK_SKEW_S: Final = 60
"""The maintenance windows use the cloud's clock."""

_UNKNOWN_WINDOW_S: Final = 3600
"""Length of a window without a known end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesLoss:
    """The cause of an attempt's end that results from a loss of its machines."""

    cause: Cause
    message: str


def explain_loss(view: View) -> MachinesLoss | None:
    """Explain an end by the loss of the machines; None if they exist, or the job names no known QueuedResource."""
    name, machines = view.job.spec.placement.queued_resource_name, view.machines
    if name is None or not view.observed.queued_resources_managed:
        return None
    if machines is not None and machines.active and not machines.deleting:
        return None
    if machines is None or machines.deleting:
        return MachinesLoss(cause=Cause.REQUESTED, message=f"QueuedResource {name} was deleted")
    if machines.replaced:
        return MachinesLoss(cause=Cause.REQUESTED, message=f"the spec of QueuedResource {name} was changed")
    why = f": {machines.obstacle}" if machines.obstacle else ""
    return MachinesLoss(
        cause=_cause_by_tier(machines, now=view.now),
        message=f"the machines of QueuedResource {name} are gone ({machines.state}){why}",
    )


def find_maintenance(view: View) -> MachinesLoss | None:
    """Find maintenance in progress. It ends the processes on the chips by SIGTERM; the machines may return later.

    It may begin at any time of the window, and waits for the processes of a node with autocheckpoint.
    """
    if not view.is_on_queued_resource or view.machines is None:
        return None
    slack_s = _CLOCK_SKEW_S + AUTOCHECKPOINT_GRACE_S
    for window in view.machines.windows:
        ends_at = window.begins_at + _UNKNOWN_WINDOW_S if window.ends_at is None else window.ends_at
        if window.begins_at - _CLOCK_SKEW_S <= view.now <= ends_at + slack_s:
            since = render_time(window.begins_at)
            text = f"QueuedResource {view.machines.name} has been under maintenance since {since}"
            return MachinesLoss(cause=Cause.MAINTENANCE, message=text)
    return None


def _cause_by_tier(machines: QueuedMachines, *, now: float) -> Cause:
    if machines.spot:
        return Cause.SPOT_PREEMPTION
    if machines.best_effort:
        return Cause.QUEUE_PREEMPTION
    begun = any(window.begins_at <= now + _CLOCK_SKEW_S for window in machines.windows)
    return Cause.MAINTENANCE if begun else Cause.NODE_FAILURE
