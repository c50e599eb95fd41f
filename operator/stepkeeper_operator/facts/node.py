"""Read a node: its identity, whether it is a Spot machine, and whether it is alive."""

from dataclasses import dataclass

from stepkeeper_operator.facts.raw import RawObject, condition_of, parse_time
from stepkeeper_operator.labels import SPOT_LABEL

__all__ = ["Node", "read_node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    uid: str
    spot: bool
    unknown_since: float | None
    """Unix time since which its kubelet is silent; None while it isn't."""

    gone_since: float | None = None
    """Unix time when its object was seen to be deleted."""

    @property
    def lost(self) -> bool:
        return self.unknown_since is not None or self.gone_since is not None


def read_node(raw: RawObject) -> Node:
    """Read the facts of a node object."""
    meta = raw["metadata"]
    ready = condition_of(raw, "Ready")
    unknown = ready.get("status") == "Unknown"
    return Node(
        name=meta["name"],
        uid=meta["uid"],
        spot=(meta.get("labels") or {}).get(SPOT_LABEL) == "true",
        unknown_since=parse_time(ready.get("lastTransitionTime")) if unknown else None,
    )
