"""Read the readable parts of a QueuedResource: a deletion works even if the spec is unreadable."""

from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from stepkeeper_operator.api.base import ApiModel, ObjectMeta
from stepkeeper_operator.api.reading import read_object
from stepkeeper_operator.api.v1alpha1.queuedresource import DeletionPolicy, QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.facts.raw import RawObject, get_nested

__all__ = ["Subject", "has_no_cloud_resource", "read_subject"]

_NEEDED: Final = ("cloudName", "provider", "removal", "operation", "operator")
"""Status fields that identify the cloud resource: without them it would be created twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A QueuedResource, or the readable parts of one that is being deleted."""

    meta: ObjectMeta
    status: QueuedResourceStatus
    resource: QueuedResource | None
    """None: it isn't readable as a whole."""

    retain: bool
    """True if its deletion leaves the cloud resource."""

    problems: tuple[str, ...] = ()
    """Path and reason of each unreadable part that keeps the object from being managed."""


class _Remnant(ApiModel):
    """A QueuedResource without its spec."""

    metadata: ObjectMeta
    status: QueuedResourceStatus = QueuedResourceStatus()


def read_subject(raw: RawObject) -> Subject:
    """Read the object. Raises ValidationError if even its metadata is unreadable."""
    meta = ObjectMeta.model_validate(raw["metadata"])
    retain = get_nested(raw, "spec", "deletionPolicy") == DeletionPolicy.RETAIN
    status = raw.get("status") or {}
    if status.get("state") not in (None, *QueuedResourceState):  # without a state it would look new
        raw = {**raw, "status": {**status, "state": QueuedResourceState.UNKNOWN.value}}
    reading, status_problems = read_object(QueuedResource, raw), _find_status_problems(status)
    resource, problems = reading.value, (*reading.problems, *status_problems)
    if resource is not None and not problems:
        return Subject(meta=meta, status=resource.status, resource=resource, retain=retain)
    remnant = read_object(_Remnant, raw).value
    known = QueuedResourceStatus() if remnant is None else remnant.status
    # A spec without its unreadable parts would mean another resource. A deletion needs no spec, but it needs `_NEEDED`.
    reported = problems if status_problems or meta.deletion_timestamp is None else ()
    return Subject(meta=meta, status=known, resource=None, retain=retain, problems=reported)


def has_no_cloud_resource(status: QueuedResourceStatus) -> bool:
    """Return True if there is certainly nothing in the cloud: it was never requested, or finally removed."""
    operator = status.operator
    if operator.created or status.removing or operator.adopting or status.was_seen:
        return False
    return operator.number == 0 or status.state is QueuedResourceState.GONE


def _find_status_problems(status: RawObject) -> tuple[str, ...]:
    """Describe the unreadable fields among `_NEEDED`. `read_object` doesn't report problems of a status."""
    needed: dict[str, Any] = {name: status[name] for name in _NEEDED if name in status}
    try:
        QueuedResourceStatus.model_validate(needed)
    except ValidationError as error:
        found = error.errors(include_url=False)
        return tuple(f"status.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
    return ()
