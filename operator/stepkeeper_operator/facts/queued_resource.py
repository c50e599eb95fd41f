"""Read of a QueuedResource what a job on its machines has to know."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stepkeeper_operator.facts.raw import RawObject, condition_of, parse_time

__all__ = ["AUTOCHECKPOINT_GRACE_S", "QueuedMachines", "read_queued_machines"]

AUTOCHECKPOINT_GRACE_S: Final = 300
"""Seconds that Cloud TPU waits for a training to save before maintenance, on nodes with autocheckpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedMachines:
    """The machines of one QueuedResource, as a job sees them."""

    name: str
    namespace: str
    uid: str
    deleting: bool
    spot: bool
    best_effort: bool
    autocheckpoint: bool
    """True if its nodes give a training 5 minutes before maintenance."""

    n_nodes: int
    """Slices that it asks for."""

    active: bool
    """True if the cloud provides all machines."""

    joined: bool
    """True if all hosts are Ready nodes of this cluster."""

    state: str
    """State of the cloud resource, in one word."""

    obstacle: str
    """The resource's own words for why it isn't active, or why its hosts haven't joined; empty if all is well."""

    replaced: bool
    """True if its machines go because somebody changed its spec."""

    maintenance_at: float | None = None
    """Unix time at which announced maintenance begins at the earliest."""

    maintenance: str = ""
    """The resource's own words about announced maintenance."""

    @property
    def ready(self) -> bool:
        """True if a job can start on it."""
        return self.active and self.joined and not self.deleting

    @property
    def grace_s(self) -> int | None:
        """Seconds that its machines give a training at their end, if more is known than the pod's own grace period."""
        return AUTOCHECKPOINT_GRACE_S if self.autocheckpoint else None


def read_queued_machines(raw: RawObject) -> QueuedMachines:
    """Read the facts of a QueuedResource object."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    node, tier = spec.get("node") or {}, spec.get("tier") or {}
    active, joined = condition_of(raw, "Active"), condition_of(raw, "NodesJoined")
    scheduled = condition_of(raw, "MaintenanceScheduled")
    told = node.get("autocheckpointEnabled")
    return QueuedMachines(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        deleting=meta.get("deletionTimestamp") is not None,
        spot="spot" in tier,
        best_effort="bestEffort" in tier,
        autocheckpoint="guaranteed" in tier if told is None else bool(told),
        n_nodes=node.get("count") or 1,
        active=active.get("status") == "True",
        joined=joined.get("status") == "True",
        state=status.get("state") or "Pending",
        obstacle=_find_obstacle(raw, active, joined),
        replaced=(status.get("bookkeeping") or {}).get("removing") == "SpecChanged",
        maintenance_at=parse_time(status.get("nextMaintenanceTime")),
        maintenance=str(scheduled.get("message", "")) if scheduled.get("status") == "True" else "",
    )


def _find_obstacle(raw: RawObject, active: Mapping[str, Any], joined: Mapping[str, Any]) -> str:
    for condition in (
        _if_false(condition_of(raw, "Accepted")),
        _if_true(condition_of(raw, "QuotaExhausted")),
    ):
        if condition:
            return str(condition.get("message", ""))
    for condition in (active, joined):
        if condition.get("status") != "True":
            return str(condition.get("message", ""))
    return ""


def _if_false(condition: Mapping[str, Any]) -> Mapping[str, Any]:
    return condition if condition.get("status") == "False" else {}


def _if_true(condition: Mapping[str, Any]) -> Mapping[str, Any]:
    return condition if condition.get("status") == "True" else {}
