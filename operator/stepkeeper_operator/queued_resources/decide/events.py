"""Derive the Kubernetes events that tell a person how the status changed. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, find_condition
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.queued_resources.decide.answers import describe_error

__all__ = ["derive_events"]

_TYPES: Final = QueuedResourceConditionType
_BAD_STATES: Final = {
    QueuedResourceState.FAILED,
    QueuedResourceState.SUSPENDED,
    QueuedResourceState.SUSPENDING,
}
_BAD: Final = {
    _TYPES.ACCEPTED: ConditionStatus.FALSE,
    _TYPES.DEGRADED: ConditionStatus.TRUE,
    _TYPES.QUOTA_EXHAUSTED: ConditionStatus.TRUE,
    _TYPES.MAINTENANCE_SCHEDULED: ConditionStatus.TRUE,
}
_GOOD: Final = {_TYPES.NODES_JOINED: ConditionStatus.TRUE}
_TIMEOUT: Final = "JoinTimeout"
_TELLING: Final = 200
"""Characters of an error by which it is known again in a longer message, which may be cut."""


def derive_events(before: QueuedResourceStatus, after: QueuedResourceStatus) -> tuple[ObjectEvent, ...]:
    """List the events between two statuses: changes of state, conditions that people act on, errors, each once."""
    conditions = _derive_condition_events(before, after)
    words = None if after.error is None else after.error.message[:_TELLING]
    told = words is not None and any(words in event.message for event in conditions)
    return (
        *_derive_state_event(before, after),
        *conditions,
        *(() if told else _derive_error_event(before, after)),
    )


def _derive_state_event(before: QueuedResourceStatus, after: QueuedResourceStatus) -> tuple[ObjectEvent, ...]:
    if after.state is None or before.state is after.state:
        return ()
    active = find_condition(after.conditions, _TYPES.ACTIVE)
    why = f": {active.message}" if active is not None and active.message else ""
    text = f"state {before.state or 'none'} to {after.state}{why}"
    return (ObjectEvent(warning=after.state in _BAD_STATES, reason=after.state.value, message=text),)


def _derive_condition_events(
    before: QueuedResourceStatus, after: QueuedResourceStatus
) -> tuple[ObjectEvent, ...]:
    events = []
    for kind in _TYPES:
        earlier, now = find_condition(before.conditions, kind), find_condition(after.conditions, kind)
        if now is None:
            continue
        same = earlier is not None and (earlier.status, earlier.reason) == (now.status, now.reason)
        if same and not (kind is _TYPES.MAINTENANCE_SCHEDULED and _is_another_window(before, after)):
            continue
        bad = _BAD.get(kind) is now.status or now.reason == _TIMEOUT
        if bad or _GOOD.get(kind) is now.status:
            events.append(ObjectEvent(warning=bad, reason=now.reason, message=now.message))
    return tuple(events)


def _is_another_window(before: QueuedResourceStatus, after: QueuedResourceStatus) -> bool:
    return after.next_maintenance_time not in {None, before.next_maintenance_time}


def _derive_error_event(before: QueuedResourceStatus, after: QueuedResourceStatus) -> tuple[ObjectEvent, ...]:
    earlier, now = before.error, after.error
    if now is None or (earlier is not None and (earlier.code, earlier.verb) == (now.code, now.verb)):
        return ()
    text = f"{now.verb}: {describe_error(after)}"
    return (ObjectEvent(warning=True, reason="CloudError", message=text),)
