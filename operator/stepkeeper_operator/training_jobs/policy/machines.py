"""Find out what a job waits for on the machines of the QueuedResource that it names: may it start, must it stop."""

from dataclasses import dataclass

from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.facts import QueuedMachines
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["MachinesWait", "find_wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesWait:
    """The reason why the job can't start on its machines now."""

    reason: Reason
    message: str
    stop: bool
    """True: what runs has to stop as well. False: hosts that have left for a moment stop nothing by themselves."""


def find_wait(view: View) -> MachinesWait | None:
    """Find why the job has to wait for its QueuedResource. None: its machines are ready, or it names none."""
    name, machines = view.job.spec.placement.queued_resource_name, view.machines
    if name is None:
        return None
    if not view.observed.queued_resources_managed:
        text = (
            f"it waits for QueuedResource {name}, and this operator doesn't manage QueuedResources: install the chart "
            "with cloudTPU.enabled=true"
        )
        return MachinesWait(reason=Reason.QUEUED_RESOURCES_DISABLED, message=text, stop=False)
    if machines is None:
        text = (
            f"it waits for QueuedResource {name}, which doesn't exist in namespace {view.job.metadata.namespace}: "
            "create it there (a job uses only one of its own namespace), or correct "
            "spec.placement.tpu.queuedResourceName"
        )
        return MachinesWait(reason=Reason.QUEUED_RESOURCE_NOT_FOUND, message=text, stop=True)
    return None if machines.ready else _describe_wait(machines)


def _describe_wait(machines: QueuedMachines) -> MachinesWait:
    where = f"QueuedResource {machines.name}"
    if machines.deleting:
        text = f"{where} is being deleted: the job is resumed on a new one of that name"
        return MachinesWait(reason=Reason.QUEUED_RESOURCE_DELETING, message=text, stop=True)
    if not machines.active:
        what = machines.obstacle or "its machines are not there yet"
        text = f"the job starts when {where} is Active, and that is {machines.state} now: {what}"
        return MachinesWait(reason=Reason.WAITING_FOR_QUEUED_RESOURCE, message=text, stop=True)
    what = machines.obstacle or "none is known yet"
    if machines.join_timed_out:
        text = f"the hosts of {where} have not joined the cluster in time: {what}"
        return MachinesWait(reason=Reason.NODES_JOIN_TIMEOUT, message=text, stop=False)
    until = (
        "" if machines.join_deadline is None else f"; they have until {render_time(machines.join_deadline)}"
    )
    text = f"it waits for the hosts of {where} to join the cluster{until}: {what}"
    return MachinesWait(reason=Reason.WAITING_FOR_NODES, message=text, stop=False)
