"""Read a QueuedResource as far as it can be read: one that is deleted goes, whatever its spec says."""

from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

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
    """None: its spec or its status can't be read."""

    retain: bool
    """Its deletion leaves the cloud resource."""

    error: str = ""
    """Why it can't be read."""


def read_subject(raw: RawObject) -> Subject:
    """Read the object. Raises ValidationError if not even its metadata can be read."""
    meta = ObjectMeta.model_validate(raw["metadata"])
    try:
        resource = QueuedResource.model_validate(raw)
    except ValidationError as error:
        policy = (raw.get("spec") or {}).get("deletionPolicy")
        status = _read_status(raw.get("status") or {})
        retain = policy == DeletionPolicy.RETAIN
        return Subject(meta=meta, status=status, resource=None, retain=retain, error=str(error))
    retain = resource.spec.deletion_policy is DeletionPolicy.RETAIN
    return Subject(meta=meta, status=resource.status, resource=resource, retain=retain)


def has_nothing(status: QueuedResourceStatus) -> bool:
    """Return True where the cloud has nothing of it for certain: it was never asked for, or was removed for good."""
    bookkeeping = status.bookkeeping
    if bookkeeping.created or bookkeeping.removing:
        return False
    return bookkeeping.number == 0 or status.state is QueuedResourceState.GONE


def _read_status(raw: dict[str, Any]) -> QueuedResourceStatus:
    try:
        return QueuedResourceStatus.model_validate(raw)
    except ValidationError:
        return QueuedResourceStatus.model_validate({name: raw[name] for name in _NEEDED if name in raw})
