"""Read the pieces that all Kubernetes objects have in common."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias

from stepkeeper_operator.api.v1alpha1.trainingjob import KIND
from stepkeeper_operator.labels import JOBSET_NUMBER_LABEL, RESTART_ATTEMPT_LABEL

__all__ = [
    "RawObject",
    "condition_of",
    "controller_of",
    "controller_uid",
    "controlling_job",
    "get_nested",
    "ordinal_of",
    "parse_time",
    "render_time",
]

RawObject: TypeAlias = Mapping[str, Any]


def parse_time(text: str | None) -> float | None:
    """Parse an RFC 3339 time to Unix seconds. Return None for None."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


def render_time(unix_s: float) -> str:
    """Render Unix seconds as RFC 3339 in whole seconds, as Kubernetes writes times. The inverse of `parse_time`."""
    return datetime.fromtimestamp(int(unix_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition_of(raw: RawObject, kind: str) -> Mapping[str, str]:
    """Return the status condition of that type, or an empty mapping."""
    for condition in raw.get("status", {}).get("conditions") or ():
        if condition["type"] == kind:
            return dict(condition)
    return {}


def get_nested(found: object, *path: str) -> object:
    """Return the value at the path, or None: the cluster's CRD may be of another version than this operator."""
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def controller_of(raw: RawObject) -> Mapping[str, Any] | None:
    """Return the reference to the owner that controls the object."""
    owners = raw["metadata"].get("ownerReferences") or ()
    return next((dict(owner) for owner in owners if owner.get("controller")), None)


def controller_uid(raw: RawObject) -> str | None:
    """Return the uid of the owner that controls the object."""
    owner = controller_of(raw)
    return None if owner is None else str(owner["uid"])


def controlling_job(raw: RawObject) -> str | None:
    """Return the name of the CheckpointedTrainingJob that controls the object."""
    owner = controller_of(raw)
    return str(owner["name"]) if owner is not None and owner["kind"] == KIND else None


def ordinal_of(raw: RawObject) -> tuple[int, int] | None:
    """Read from its labels the attempt that an object belongs to. Return None if they don't name one."""
    labels = raw["metadata"].get("labels") or {}
    number, attempt = labels.get(JOBSET_NUMBER_LABEL, ""), labels.get(RESTART_ATTEMPT_LABEL, "")
    return (int(number), int(attempt)) if number.isdecimal() and attempt.isdecimal() else None
