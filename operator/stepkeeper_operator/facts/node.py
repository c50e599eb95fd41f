"""Read a node: its identity, whether it is a Spot machine, whether it is alive, and its QueuedResource."""

from dataclasses import dataclass

from stepkeeper_operator.facts.raw import RawObject, condition_of, parse_time
from stepkeeper_operator.labels import (
    CORDONED_BY_ANNOTATION,
    QUEUED_RESOURCE_UID_LABEL,
    SLICE_LABEL,
    SPOT_LABEL,
)

__all__ = ["Node", "read_node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    uid: str
    spot: bool
    unknown_since: float | None
    """Unix time since which its kubelet has been silent; None while it reports."""

    ready: bool = True
    unschedulable: bool = False
    """True for a cordoned node."""

    cordoned_by: str = ""
    """Uid of the QueuedResource whose removal made the operator cordon it; empty: none."""

    queued_resource_uid: str | None = None
    """Uid of the QueuedResource that its labels name. Every user who can label nodes can set it."""

    slice_id: str = ""
    """Id of the slice that its labels name; empty: none."""

    addresses: tuple[str, ...] = ()
    """Internal addresses."""

    gone_since: float | None = None
    """Unix time when the operator saw the deletion of its object."""

    @property
    def schedulable(self) -> bool:
        """True if pods can be scheduled to it."""
        return self.ready and not self.unschedulable

    @property
    def lost(self) -> bool:
        return self.unknown_since is not None or self.gone_since is not None


def read_node(raw: RawObject) -> Node:
    """Read the facts of a node object."""
    meta = raw["metadata"]
    labels = meta.get("labels") or {}
    ready = condition_of(raw, "Ready")
    unknown = ready.get("status") == "Unknown"
    return Node(
        name=meta["name"],
        uid=meta["uid"],
        spot=labels.get(SPOT_LABEL) == "true",
        unknown_since=parse_time(ready.get("lastTransitionTime")) if unknown else None,
        ready=ready.get("status") == "True",
        unschedulable=bool(raw.get("spec", {}).get("unschedulable")),
        cordoned_by=(meta.get("annotations") or {}).get(CORDONED_BY_ANNOTATION, ""),
        queued_resource_uid=labels.get(QUEUED_RESOURCE_UID_LABEL),
        slice_id=labels.get(SLICE_LABEL, ""),
        addresses=tuple(
            item["address"]
            for item in (raw.get("status") or {}).get("addresses") or ()
            if item.get("type") == "InternalIP"
        ),
    )
