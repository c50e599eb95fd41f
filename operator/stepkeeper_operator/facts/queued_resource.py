"""Read the facts of a QueuedResource that a job on its machines needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from stepkeeper_operator.api.accelerators import ACCELERATORS, Accelerator, count_chips
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResourceSpec, choose_autocheckpoint
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.facts.raw import RawObject, condition_of, get_nested, parse_time
from stepkeeper_operator.facts.rival import Rival, read_standing

__all__ = [
    "MachinesUser",
    "MaintenanceWindow",
    "QueuedMachines",
    "Slices",
    "read_machines_user",
    "read_queued_machines",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The slices of a QueuedResource, or those that a job asks for. Without a readable spec, its strings are empty."""

    accelerator: str
    topology: str
    count: int

    @override
    def __str__(self) -> str:
        return f"{self.count} slice{'s' if self.count > 1 else ''} of {self.accelerator} {self.topology}"

    def can_run(self, asked: "Slices") -> bool:
        """Return True if a job can run here: on whole slices, or on a part of slices that are one host each.

        The TPU software of a larger slice waits for all its hosts.
        """
        if asked.accelerator != self.accelerator or asked.count > self.count:
            return False
        n_chips, host_sizes = (
            count_chips(self.topology),
            ACCELERATORS[Accelerator(self.accelerator)].host_sizes,
        )
        return asked.topology == self.topology or count_chips(asked.topology) <= n_chips <= max(host_sizes)

    def count_taken_chips(self, asked: "Slices") -> int:
        """Count the chips that a job takes. Of several slices, each is given to one job only."""
        return asked.count * count_chips((asked if self.count == 1 else self).topology)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesUser(Rival):
    """A job as the user of a QueuedResource."""

    slices: Slices


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceWindow:
    """Announced maintenance of at least one of the machines."""

    begins_at: float
    """Unix time of its earliest start."""

    ends_at: float | None
    """Unix time of its latest end, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedMachines:
    """The machines of one QueuedResource, as a job sees them."""

    name: str
    namespace: str
    uid: str
    deleting: bool
    spot: bool
    best_effort: bool
    autocheckpoint_setting: str
    """On, Off or Mixed, as the cloud reports for its slices; until it reports, the setting of the spec."""

    slices: Slices
    """The slices that it asks for."""

    active: bool
    """True if the cloud provides all machines."""

    joined: bool
    """True if all hosts are Ready nodes of this cluster."""

    join_deadline: float | None
    """Unix time by which its hosts have to join, or come back, once it is active."""

    join_timed_out: bool
    """True if that time has passed and not all have joined."""

    state: str
    """State of the cloud resource, in one word."""

    obstacle: str
    """The resource's message about why it isn't active, or why its hosts haven't joined; empty: no obstacle."""

    replaced: bool
    """True if its machines are removed because its spec was changed."""

    windows: tuple[MaintenanceWindow, ...] = ()
    """Announced and ongoing maintenance of all its machines, the earliest first."""

    @property
    def autocheckpoint(self) -> bool:
        """True if all its slices have autocheckpoint: 5 minutes for a save before maintenance."""
        return self.autocheckpoint_setting == "On"

    @property
    def ready(self) -> bool:
        """True if a job can start on it."""
        return self.active and self.joined and not self.deleting


def read_queued_machines(raw: RawObject) -> QueuedMachines:
    """Read the facts of a QueuedResource object."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    slices, tier = spec.get("slices") or {}, spec.get("tier") or {}
    active, joined = condition_of(raw, "Active"), condition_of(raw, "NodesJoined")
    return QueuedMachines(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        deleting=meta.get("deletionTimestamp") is not None,
        spot="spot" in tier,
        best_effort="bestEffort" in tier,
        autocheckpoint_setting=_find_autocheckpoint(status.get("autocheckpoint") or "", slices, tier),
        slices=_read_slices(slices, "count"),
        active=active.get("status") == "True",
        joined=joined.get("status") == "True",
        join_deadline=_find_join_deadline(spec, status),
        join_timed_out=joined.get("reason") == Reason.JOIN_TIMEOUT,
        state=status.get("state") or "Pending",
        obstacle=_find_obstacle(raw, active, joined),
        replaced=(status.get("removal") or {}).get("reason") == Reason.SPEC_CHANGED,
        windows=_read_windows(status),
    )


def read_machines_user(raw: RawObject) -> MachinesUser:
    """Read the facts of a job that names a QueuedResource."""
    slices = _read_slices(get_nested(raw, "spec", "placement", "tpu"), "slices")
    return MachinesUser(slices=slices, **read_standing(raw))


def _read_slices(found: Any, count: str) -> Slices:
    return Slices(
        accelerator=found.get("accelerator") or "",
        topology=found.get("topology") or "",
        count=found.get(count) or 1,
    )


def _read_windows(status: Mapping[str, Any]) -> tuple[MaintenanceWindow, ...]:
    """Read the windows of all slices: once the earliest has begun, it would hide the later ones."""
    announced = [
        each["upcomingMaintenance"] for each in status.get("slices") or () if "upcomingMaintenance" in each
    ]
    # The status lists a limited number of slices, but its earliest time covers all of them.
    announced.append({"windowStart": status.get("nextMaintenanceTime")})
    windows: dict[float, MaintenanceWindow] = {}
    for item in announced:
        begins_at = parse_time(item.get("windowStart"))
        if begins_at is not None and begins_at not in windows:
            windows[begins_at] = MaintenanceWindow(
                begins_at=begins_at, ends_at=parse_time(item.get("windowEnd"))
            )
    return tuple(windows[begins_at] for begins_at in sorted(windows))


def _find_join_deadline(spec: Mapping[str, Any], status: Mapping[str, Any]) -> float | None:
    since = parse_time(status.get("missingHostsSince"))
    default = QueuedResourceSpec.model_fields["join_timeout_seconds"].default
    return None if since is None else since + spec.get("joinTimeoutSeconds", default)


def _find_autocheckpoint(reported: str, slices: Mapping[str, Any], tier: Mapping[str, Any]) -> str:
    """Find the setting of its slices. Until the cloud reports it, the spec counts."""
    if reported:
        return reported
    requested = choose_autocheckpoint(slices.get("autocheckpointEnabled"), guaranteed="guaranteed" in tier)
    return "On" if requested else "Off"


def _find_obstacle(raw: RawObject, active: Mapping[str, Any], joined: Mapping[str, Any]) -> str:
    """Find the message of the condition that best explains why jobs can't start: the first that applies."""
    accepted, quota = condition_of(raw, "Accepted"), condition_of(raw, "QuotaExhausted")
    # While the cloud hasn't answered, the message of condition Active says more.
    undecided = accepted.get("status") == "Unknown" and accepted.get("reason") != Reason.NOT_ANSWERED
    inactive = active.get("status") != "True"
    found = (
        (accepted, accepted.get("status") == "False"),
        (quota, quota.get("status") == "True"),
        (accepted, inactive and undecided),
        (active, inactive),
        (joined, joined.get("status") != "True"),
    )
    return next((str(condition.get("message", "")) for condition, holds in found if holds), "")
