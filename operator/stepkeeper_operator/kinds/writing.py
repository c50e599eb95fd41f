"""Write what every controller writes to its own objects: status, finalizers and events."""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from stepkeeper_operator.api.base import ObjectMeta, StatusPart
from stepkeeper_operator.api.reading import describe_problems, keep_unknown, read_object
from stepkeeper_operator.api.v1alpha1.conditions import (
    MAX_CONDITIONS,
    Condition,
    ConditionType,
    ConditionUpdate,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cluster.resources import EVENTS, Resource
from stepkeeper_operator.errors import ApiError, InvalidObjectError
from stepkeeper_operator.facts.raw import RawObject, condition_of
from stepkeeper_operator.kinds.decision import ObjectEvent
from stepkeeper_operator.kinds.shared import Shared

__all__ = ["ObjectWriter", "renew_condition"]

_log = logging.getLogger(__name__)

_EVENT_LIMIT = 1024
"""Longest note of an event that Kubernetes accepts, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectWriter:
    """Write to the objects of one kind, and count the writes of their controller."""

    resource: Resource
    shared: Shared

    async def write_status(self, meta: ObjectMeta, status: StatusPart) -> RawObject:
        """Replace the status of the object, except fields that only newer operators know. Return the updated object.

        Raises InvalidObjectError if no status is accepted with this spec, ConflictError if it has changed, ApiError.
        """
        # An object that has changed since it was read is refused by its resourceVersion.
        known = self.shared.cache.get_object(self._key_of(meta)) or {}
        return await self._apply_status(
            meta, keep_unknown(type(status), known.get("status"), status.to_raw())
        )

    async def _apply_status(self, meta: ObjectMeta, status: RawObject) -> RawObject:
        body = {
            "apiVersion": self.resource.api_version,
            "kind": self.resource.kind,
            "metadata": {
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
                "resourceVersion": meta.resource_version,
            },
            "status": status,
        }
        raw = await self.shared.cluster.apply(self.resource, meta.namespace, body, subresource="status")
        self.count_write("status", meta)
        return raw

    async def set_finalizers(self, meta: ObjectMeta, finalizers: Sequence[str]) -> RawObject | None:
        """Replace the object's finalizers. Return the updated object, or None if it no longer exists.

        Raises ConflictError if the object has changed, ApiError.
        """
        raw = await self.shared.cluster.set_finalizers(
            self.resource,
            meta.namespace,
            meta.name,
            finalizers,
            uid=meta.uid,
            resource_version=meta.resource_version,
        )
        self.count_write("finalizers", meta)
        return raw

    async def create_event(self, meta: ObjectMeta, event: ObjectEvent) -> None:
        """Create a Kubernetes event regarding the object, and log it."""
        fields = self._key_of(meta).log_fields
        _log.info(event.message, extra={**fields, "reason": event.reason})
        body = _event_manifest(self.resource, meta, event, self.shared)
        try:
            await self.shared.cluster.create(EVENTS, meta.namespace, body)
        except ApiError as error:
            # The status has the same text, so a lost event is not worth repeating the other writes.
            _log.warning("cannot write event", extra={**fields, "error": str(error)})

    async def report_unreadable(
        self, raw: RawObject, problems: Sequence[str], *, initial: RawObject
    ) -> RawObject | None:
        """Report the unreadable parts of the object's spec in condition Accepted and in an event.

        If the API server rejects the status of such an object, the parts are logged, and nothing is retried.

        Args:
            raw: The object.
            problems: Path and reason of each part.
            initial: The fields of a new status.

        Returns:
            The updated object. None if nothing was written: it has that condition, or the status was rejected.

        Raises:
            ApiError: The write failed.
        """
        meta = ObjectMeta.model_validate(raw["metadata"])
        text, accepted = describe_problems(problems), ConditionType.ACCEPTED
        update = ConditionUpdate(accepted, Reason.UNREADABLE_SPEC, text, status=False)
        known = condition_of(raw, accepted)
        condition = renew_condition(known, update, generation=meta.generation, now=self.shared.clock())
        if condition is known:
            return None
        status = raw.get("status") or {}
        others = [c for c in status.get("conditions") or () if c.get("type") != accepted]
        status = {**initial, **status, "conditions": [condition, *others][:MAX_CONDITIONS]}
        try:
            written = await self._apply_status(meta, status)
        except InvalidObjectError as error:
            extra = {**self._key_of(meta).log_fields, "problems": condition["message"], "error": str(error)}
            _log.warning("cannot write status of unreadable object; it is not managed", extra=extra)
            return None
        event = ObjectEvent(warning=True, reason=Reason.UNREADABLE_SPEC, message=condition["message"])
        await self.create_event(meta, event)
        return written

    def count_write(self, what: str, meta: ObjectMeta) -> None:
        """Count and log a write that was made for the object."""
        self.shared.metrics.writes.labels(kind=self.resource.kind, what=what).inc()
        _log.debug("wrote", extra={"what": what, **self._key_of(meta).log_fields})

    def _key_of(self, meta: ObjectMeta) -> ObjectKey:
        return ObjectKey(self.resource.kind, meta.namespace, meta.name)


def renew_condition(known: RawObject, update: ConditionUpdate, *, generation: int, now: float) -> RawObject:
    """Return the new condition; `known` itself if they differ at most in observedGeneration, or in unknown fields."""
    before = read_object(Condition, known).value
    after = update.apply_to(before, generation=generation, now=now)
    same = before is not None and before.model_copy(update={"observed_generation": generation}) == after
    return known if same else after.to_raw()


def _event_manifest(resource: Resource, meta: ObjectMeta, event: ObjectEvent, shared: Shared) -> RawObject:
    """Build an event regarding the object, with a random name."""
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": f"{meta.name}.{uuid.uuid4().hex[:16]}", "namespace": meta.namespace},
        "eventTime": datetime.fromtimestamp(shared.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": "stepkeeper.dev/operator",
        "reportingInstance": shared.identity,
        "action": "Reconcile",
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        # A character that the limit cuts in two is left out.
        "note": event.message.encode()[:_EVENT_LIMIT].decode(errors="ignore"),
        "regarding": {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "name": meta.name,
            "namespace": meta.namespace,
            "uid": meta.uid,
        },
    }
