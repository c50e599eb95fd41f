"""Read a QueuedResource as far as it can be read: one that is deleted goes, whatever its spec says."""

from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from stepkeeper_operator.api.reading import read_object
from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.api.v1alpha1.queuedresource import DeletionPolicy, QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["Subject", "has_nothing", "read_subject"]

_NEEDED: Final = ("cloudName", "apiVersion", "operation", "bookkeeping")
"""Fields of a status by which a resource is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A QueuedResource, or what is left of one that can't be read."""

    meta: ObjectMeta
    status: QueuedResourceStatus
    resource: QueuedResource | None
    """None: its spec can't be read, or a part of its status by which a resource is found."""

    retain: bool
    """Its deletion leaves the cloud resource."""

    problems: tuple[str, ...] = ()
    """Path and reason of each part that can't be read. With a part of the spec left out, it would be another one's."""

    unfindable: bool = False
    """Its status doesn't tell by what name it is in the cloud: nothing can be done for it, nor can it be deleted."""


def read_subject(raw: RawObject) -> Subject:
    """Read the object. Raises ValidationError if not even its metadata can be read."""
    meta = ObjectMeta.model_validate(raw["metadata"])
    reading, raw_status = read_object(QueuedResource, _with_known_state(raw)), raw.get("status") or {}
    unfindable = _find_status_problems(raw_status)
    if reading.value is None or reading.problems or unfindable:
        policy = (raw.get("spec") or {}).get("deletionPolicy")
        return Subject(
            meta=meta,
            status=QueuedResourceStatus() if unfindable else _read_status(raw_status),
            resource=None,
            retain=policy == DeletionPolicy.RETAIN,
            problems=(*reading.problems, *unfindable),
            unfindable=bool(unfindable),
        )
    resource = reading.value
    retain = resource.spec.deletion_policy is DeletionPolicy.RETAIN
    return Subject(meta=meta, status=resource.status, resource=resource, retain=retain)


def has_nothing(status: QueuedResourceStatus) -> bool:
    """Return True where the cloud has nothing of it for certain: it was never asked for, or was removed for good."""
    bookkeeping = status.bookkeeping
    if bookkeeping.created or bookkeeping.removing or bookkeeping.adopting:
        return False
    return bookkeeping.number == 0 or status.state is QueuedResourceState.GONE


def _with_known_state(raw: RawObject) -> RawObject:
    """Return the object with its state Unknown if a newer operator named it. Without a state it would be a new one."""
    status = raw.get("status") or {}
    if status.get("state") in (None, *QueuedResourceState):
        return raw
    return {**raw, "status": {**status, "state": QueuedResourceState.UNKNOWN.value}}


def _find_status_problems(raw: RawObject) -> tuple[str, ...]:
    """Find what can't be read of the parts by which a resource is found: without them it would be made twice."""
    try:
        QueuedResourceStatus.model_validate(_pick_needed(raw))
    except ValidationError as error:
        found = error.errors(include_url=False)
        return tuple(f"status.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
    return ()


def _read_status(raw: RawObject) -> QueuedResourceStatus:
    try:
        return QueuedResourceStatus.model_validate(raw)
    except ValidationError:
        return QueuedResourceStatus.model_validate(_pick_needed(raw))


def _pick_needed(raw: RawObject) -> dict[str, Any]:
    return {name: raw[name] for name in _NEEDED if name in raw}
