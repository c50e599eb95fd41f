"""Find whether a job has to wait for the machines of its QueuedResource, and whether its pods have to stop."""

from dataclasses import dataclass

from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.facts.queued_resource import QueuedMachines
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["MachinesWait", "find_wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesWait:
    """The reason why the job can't start on its machines now."""

    reason: Reason
    message: str
    stop: bool
    """True if running pods have to stop as well. Hosts that left for a moment stop no pods."""


def find_wait(view: View) -> MachinesWait | None:
    """Find why the job has to wait for its QueuedResource; None if its machines are ready, or it names none."""
    name, machines = view.job.spec.placement.queued_resource_name, view.machines
    if name is None:
        return None
    if not view.observed.queued_resources_managed:
        text = (
            f"waiting for QueuedResource {name}, but this operator does not manage QueuedResources: install the chart "
            "with cloudTPU.enabled=true"
        )
        return MachinesWait(reason=Reason.QUEUED_RESOURCES_DISABLED, message=text, stop=False)
    if machines is None:
        text = (
            f"QueuedResource {name} does not exist in namespace {view.job.metadata.namespace}: create it there "
            "(a job can use only a QueuedResource of its own namespace), or fix "
            "spec.placement.tpu.queuedResourceName"
        )
        return MachinesWait(reason=Reason.QUEUED_RESOURCE_NOT_FOUND, message=text, stop=True)
    return None if machines.ready else _describe_wait(machines)


def _describe_wait(machines: QueuedMachines) -> MachinesWait:
    where = f"QueuedResource {machines.name}"
    if machines.deleting:
        text = f"{where} is being deleted; the job resumes on a new QueuedResource with that name"
        return MachinesWait(reason=Reason.QUEUED_RESOURCE_DELETING, message=text, stop=True)
    if not machines.active:
        what = machines.obstacle or "its machines do not exist yet"
        text = f"the job starts when {where} is Active; its state is {machines.state}: {what}"
        return MachinesWait(reason=Reason.WAITING_FOR_QUEUED_RESOURCE, message=text, stop=True)
    what = machines.obstacle or "no host is known yet"
    if machines.join_timed_out:
        text = f"the hosts of {where} have not joined the cluster in time: {what}"
        return MachinesWait(reason=Reason.NODES_JOIN_TIMEOUT, message=text, stop=False)
    until = "" if machines.join_deadline is None else f" (deadline {render_time(machines.join_deadline)})"
    text = f"waiting for the hosts of {where} to join the cluster{until}: {what}"
    return MachinesWait(reason=Reason.WAITING_FOR_NODES, message=text, stop=False)
