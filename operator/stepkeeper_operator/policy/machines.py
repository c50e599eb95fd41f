"""Judge the machines of the QueuedResource that a job names: may it start, must it stop, and what ended its attempt."""

from dataclasses import dataclass
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.build.placement import AUTOCHECKPOINT_GRACE_S
from stepkeeper_operator.facts.queued_resource import QueuedMachines
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.observed import Observed

__all__ = [
    "MachinesLoss",
    "MachinesWait",
    "explain_loss",
    "find_maintenance",
    "find_wait",
    "is_explained_by_machines",
]

_DISABLED: Final = "QueuedResourcesDisabled"
_MISSING: Final = "QueuedResourceNotFound"
_DELETING: Final = "QueuedResourceDeleting"
_WAITING: Final = "WaitingForQueuedResource"
_NOT_JOINED: Final = "WaitingForNodes"
_JOIN_TIMEOUT: Final = "NodesJoinTimeout"
_LOST: Final = "QueuedResourceLost"
_CLOCK_SKEW_S: Final = 60
"""The windows of maintenance have the cloud's clock."""

_UNKNOWN_WINDOW_S: Final = 3600
"""Length of a window whose end isn't told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesWait:
    """The reason why the job can't start on its machines now."""

    reason: str
    message: str
    stop: bool
    """True: what runs has to stop as well. False: hosts that have left for a moment stop nothing by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesLoss:
    """The cause that a loss of the machines gives to the end of an attempt."""

    cause: Cause
    message: str


def find_wait(job: CheckpointedTrainingJob, observed: Observed) -> MachinesWait | None:
    """Find why the job has to wait for its QueuedResource. None: its machines are ready, or it names none."""
    name, machines = job.spec.placement.queued_resource_name, observed.machines
    if name is None:
        return None
    if not observed.queued_resources_managed:
        text = (
            f"it waits for QueuedResource {name}, and this operator doesn't manage QueuedResources: install the chart "
            "with cloudTPU.enabled=true"
        )
        return MachinesWait(reason=_DISABLED, message=text, stop=False)
    if machines is None:
        text = (
            f"it waits for QueuedResource {name}, which doesn't exist in namespace {job.metadata.namespace}: create it "
            "there (a job uses only one of its own namespace), or correct spec.placement.tpu.queuedResourceName"
        )
        return MachinesWait(reason=_MISSING, message=text, stop=True)
    return None if machines.ready else _describe_wait(machines, started=bool(job.status.attempts))


def _describe_wait(machines: QueuedMachines, *, started: bool) -> MachinesWait:
    where = f"QueuedResource {machines.name}"
    if machines.deleting:
        text = f"{where} is being deleted: the job is resumed on a new one of that name"
        return MachinesWait(reason=_DELETING, message=text, stop=True)
    if not machines.active:
        text = f"it waits for {where} ({machines.state}): {machines.obstacle or 'its machines are not there yet'}"
        return MachinesWait(reason=_LOST if started else _WAITING, message=text, stop=True)
    if machines.join_timed_out:
        text = f"the hosts of {where} have not joined the cluster in time: {machines.obstacle}"
        return MachinesWait(reason=_JOIN_TIMEOUT, message=text, stop=False)
    until = (
        "" if machines.join_deadline is None else f"; they have until {render_time(machines.join_deadline)}"
    )
    what = machines.obstacle or "none is known yet"
    text = f"it waits for the hosts of {where} to join the cluster{until}: {what}"
    return MachinesWait(reason=_NOT_JOINED, message=text, stop=False)


def explain_loss(job: CheckpointedTrainingJob, observed: Observed, *, now: float) -> MachinesLoss | None:
    """Explain an end by what happened to the machines. None: all are there, or the job names none that is seen."""
    name, machines = job.spec.placement.queued_resource_name, observed.machines
    if name is None or not observed.queued_resources_managed:
        return None
    if machines is not None and machines.active and not machines.deleting:
        return None
    if machines is None or machines.deleting:
        return MachinesLoss(cause=Cause.REQUESTED, message=f"QueuedResource {name} was deleted")
    if machines.replaced:
        return MachinesLoss(cause=Cause.REQUESTED, message=f"the spec of QueuedResource {name} was changed")
    return MachinesLoss(
        cause=_cause_by_tier(machines, now=now),
        message=f"the machines of QueuedResource {name} are gone ({machines.state}): {machines.obstacle}",
    )


def find_maintenance(job: CheckpointedTrainingJob, observed: Observed, *, now: float) -> MachinesLoss | None:
    """Find maintenance that goes on. It ends what uses the chips by SIGTERM, and the machines may come back after it.

    It may begin until the window's end, and waits for the processes of a node with autocheckpoint.
    """
    machines = observed.machines
    if job.spec.placement.queued_resource_name is None or machines is None:
        return None
    slack_s = _CLOCK_SKEW_S + AUTOCHECKPOINT_GRACE_S
    for window in machines.windows:
        ends_at = window.begins_at + _UNKNOWN_WINDOW_S if window.ends_at is None else window.ends_at
        if window.begins_at - _CLOCK_SKEW_S <= now <= ends_at + slack_s:
            text = f"QueuedResource {machines.name} has maintenance since {render_time(window.begins_at)}"
            return MachinesLoss(cause=Cause.MAINTENANCE, message=text)
    return None


def is_explained_by_machines(job: CheckpointedTrainingJob, message: str | None) -> bool:
    """Return True if an attempt's message has the words of `explain_loss`: later evidence knows less than they do."""
    name = job.spec.placement.queued_resource_name
    return name is not None and message is not None and f"QueuedResource {name} " in message


def _cause_by_tier(machines: QueuedMachines, *, now: float) -> Cause:
    if machines.spot:
        return Cause.SPOT_PREEMPTION
    if machines.best_effort:
        return Cause.QUEUE_PREEMPTION
    begun = any(window.begins_at <= now + _CLOCK_SKEW_S for window in machines.windows)
    return Cause.MAINTENANCE if begun else Cause.NODE_FAILURE
