"""Read a QueuedResource as far as possible: a deleted one is removed even if its spec can't be read."""

from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from stepkeeper_operator.api.base import ApiModel, ObjectMeta
from stepkeeper_operator.api.reading import read_object
from stepkeeper_operator.api.v1alpha1.queuedresource import DeletionPolicy, QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.facts.raw import RawObject, read_in

__all__ = ["Subject", "has_nothing", "read_subject"]

_NEEDED: Final = ("cloudName", "provider", "removal", "operation", "operator")
"""Fields of a status by which a resource is found: without them it would be made twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A QueuedResource, or what is left of one that is being deleted and can't be read."""

    meta: ObjectMeta
    status: QueuedResourceStatus
    resource: QueuedResource | None
    """None: it can't be read as a whole."""

    retain: bool
    """Its deletion leaves the cloud resource."""

    problems: tuple[str, ...] = ()
    """Path and reason of each part without which nothing can be done for the object."""


class _Remnant(ApiModel):
    """A QueuedResource without its spec."""

    metadata: ObjectMeta
    status: QueuedResourceStatus = QueuedResourceStatus()


def read_subject(raw: RawObject) -> Subject:
    """Read the object. Raises ValidationError if not even its metadata can be read."""
    meta = ObjectMeta.model_validate(raw["metadata"])
    retain, status = read_in(raw, "spec", "deletionPolicy") == DeletionPolicy.RETAIN, raw.get("status") or {}
    if status.get("state") not in (None, *QueuedResourceState):  # without a state it would be a new one
        raw = {**raw, "status": {**status, "state": QueuedResourceState.UNKNOWN.value}}
    reading, unfindable = read_object(QueuedResource, raw), _find_status_problems(status)
    resource, problems = reading.value, (*reading.problems, *unfindable)
    if resource is not None and not problems:
        return Subject(meta=meta, status=resource.status, resource=resource, retain=retain)
    remnant = read_object(_Remnant, raw).value
    known = QueuedResourceStatus() if remnant is None else remnant.status
    # With a part of its spec left out, it would be another one's; but a deletion needs no spec.
    reported = problems if unfindable or meta.deletion_timestamp is None else ()
    return Subject(meta=meta, status=known, resource=None, retain=retain, problems=reported)


def has_nothing(status: QueuedResourceStatus) -> bool:
    """Return True where the cloud has nothing of it for certain: it was never asked for, or was removed for good."""
    operator = status.operator
    if operator.created or status.removing or operator.adopting or status.was_seen:
        return False
    return operator.number == 0 or status.state is QueuedResourceState.GONE


def _find_status_problems(status: RawObject) -> tuple[str, ...]:
    needed: dict[str, Any] = {name: status[name] for name in _NEEDED if name in status}
    try:
        QueuedResourceStatus.model_validate(needed)
    except ValidationError as error:
        found = error.errors(include_url=False)
        return tuple(f"status.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
    return ()
