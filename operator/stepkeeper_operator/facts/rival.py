"""Read how a job stands beside others that want what it wants: its checkpoint root, or its machines."""

from dataclasses import dataclass
from typing import Any

from stepkeeper_operator.api.v1alpha1.conditions import END_CONDITIONS, Phase
from stepkeeper_operator.facts.raw import RawObject, condition_of, get_nested, parse_time

__all__ = ["Rival", "read_standing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A job as one of several that want the same."""

    namespace: str
    name: str
    uid: str
    created_at: float
    started: bool
    """True if it has had an attempt."""

    inactive: bool
    """True if it has ended or is suspended."""


def read_standing(raw: RawObject) -> dict[str, Any]:
    """Read the fields of a `Rival`, even if the job's spec is unreadable."""
    meta, status = raw["metadata"], raw.get("status") or {}
    ended = any(condition_of(raw, kind).get("status") == "True" for kind in END_CONDITIONS)
    suspended = get_nested(raw.get("spec"), "suspend") is True and status.get("phase") == Phase.SUSPENDED
    return {
        "namespace": meta["namespace"],
        "name": meta["name"],
        "uid": meta["uid"],
        "created_at": parse_time(meta.get("creationTimestamp")) or 0.0,
        "started": bool(status.get("attempts")),
        "inactive": ended or suspended,
    }
