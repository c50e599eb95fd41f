"""Derive the conditions of a QueuedResource, and events about its changes. Pure."""

from collections.abc import Iterable
from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import (
    ConditionStatus,
    ConditionUpdate,
    find_condition,
    merge_conditions,
)
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudMaintenance, ErrorKind, to_camel_case
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.kinds.decision import ObjectEvent, find_soonest
from stepkeeper_operator.queued_resources.cloud_view import CloudView, View
from stepkeeper_operator.queued_resources.decide.answers import describe_error, error_kind, name_error
from stepkeeper_operator.queued_resources.decide.mirror import find_next_maintenance
from stepkeeper_operator.queued_resources.decide.problems import degraded, find_problems, name_some
from stepkeeper_operator.queued_resources.decision import Decision, Plan, judge_accepted
from stepkeeper_operator.queued_resources.observed import Verb

__all__ = ["conclude", "derive_conditions"]

_TYPES: Final = QueuedResourceConditionType

_STATE_TEXTS: Final = {
    QueuedResourceState.PENDING: "nothing is requested from the cloud yet",
    QueuedResourceState.CREATING: "the cloud is creating the request",
    QueuedResourceState.ACCEPTED: "the request waits in the queue for machines",
    QueuedResourceState.WAITING: "the request waits in the queue for machines",
    QueuedResourceState.PROVISIONING: "the machines are being provided",
    QueuedResourceState.SUSPENDING: "the cloud takes the machines back",
    QueuedResourceState.SUSPENDED: "the machines are gone",
    QueuedResourceState.DELETING: "it is being deleted",
    QueuedResourceState.FAILED: "the cloud could not provide the machines, and gives no details",
    QueuedResourceState.GONE: "it was removed and isn't recreated",
}
_REFUSALS: Final = {
    ErrorKind.TERMINAL: Reason.REFUSED,
    ErrorKind.NOT_FOUND: Reason.REFUSED,
    ErrorKind.ALREADY_EXISTS: Reason.ALREADY_EXISTS,
    ErrorKind.CREDENTIALS: Reason.NO_CREDENTIALS,
}
_ADVICE: Final = {
    ErrorKind.TERMINAL: "Fix the spec or the project as the message requires. The request is retried every hour, and at"
    " once after a change of the spec",
    ErrorKind.NOT_FOUND: "Check spec.project and spec.zone. The request is retried every hour, and at once after a"
    " change of the spec",
    ErrorKind.ALREADY_EXISTS: "A slice, or a resource that isn't listed, has that name: choose another metadata.name or"
    " slices.namePrefix, or delete it. After a recent deletion the name will be free soon: the request is retried",
    ErrorKind.CREDENTIALS: "Give the operator valid credentials: cloudTPU.credentialsSecret in the chart's values"
    " (examples/queued_resource/README.md)",
}
_GRANTED: Final = {  # states of a request that has its quota
    QueuedResourceState.WAITING,
    QueuedResourceState.PROVISIONING,
    QueuedResourceState.ACTIVE,
    QueuedResourceState.SUSPENDING,
    QueuedResourceState.SUSPENDED,
}
_BAD_STATES: Final = {  # their events are warnings
    QueuedResourceState.FAILED,
    QueuedResourceState.SUSPENDED,
    QueuedResourceState.SUSPENDING,
}
_BAD: Final = {  # conditions whose events are warnings, and the status that is reported
    _TYPES.ACCEPTED: ConditionStatus.FALSE,
    _TYPES.DEGRADED: ConditionStatus.TRUE,
    _TYPES.QUOTA_EXHAUSTED: ConditionStatus.TRUE,
    _TYPES.MAINTENANCE_SCHEDULED: ConditionStatus.TRUE,
}
_GOOD: Final = {_TYPES.NODES_JOINED: ConditionStatus.TRUE}  # the same for normal events
_EXCERPT_LENGTH: Final = 200
"""Characters of an error that identify it in a longer message, which may be cut."""


def derive_conditions(
    resource: QueuedResource, plan: Plan, status: QueuedResourceStatus, view: View
) -> Iterable[ConditionUpdate]:
    """Derive the conditions that can be judged now, except NodesJoined. The others stay unchanged."""
    findings = (
        plan.accepted or _derive_accepted(plan, view.cloud, status),
        _derive_active(plan, view.cloud, status),
        degraded((*plan.problems, *find_problems(resource, view))),
        _derive_maintenance(view),
        _derive_quota(view.cloud, status),
    )
    return (finding for finding in findings if finding is not None)


def _derive_accepted(plan: Plan, cloud: CloudView, status: QueuedResourceStatus) -> ConditionUpdate | None:
    error, kind = status.error, error_kind(status)
    if error is not None and error.verb != Verb.DELETE and kind in _REFUSALS:
        return judge_accepted(_REFUSALS[kind], f"{error.code}: {error.message}. {_ADVICE[kind]}")
    if cloud.resource is not None and cloud.resource.phase is not QueuedResourceState.FAILED:
        return judge_accepted(Reason.ACCEPTED, f"the cloud has {cloud.resource.name}", status=True)
    known = find_condition(status.conditions, _TYPES.ACCEPTED) is not None
    if known and not (cloud.known or plan.actions):  # neither a new answer nor a new request
        return None
    pending = status.operator.asked_at is not None or status.operation is not None
    idle = "no request is pending: see condition Active for the reason"
    text = "the cloud has not answered yet" if pending else idle
    return judge_accepted(Reason.NOT_ANSWERED, text, status=None)


def _derive_active(plan: Plan, cloud: CloudView, status: QueuedResourceStatus) -> ConditionUpdate | None:
    kind, state = _TYPES.ACTIVE, status.state or QueuedResourceState.PENDING
    removing, found = status.removing, cloud.resource
    if removing:
        return ConditionUpdate(type=kind, status=False, reason=Reason(removing), message=plan.waiting)
    if not cloud.known and status.conditions:  # keep the condition as it was last derived from a listing
        return None
    if state is QueuedResourceState.ACTIVE:
        return ConditionUpdate(kind, Reason.ACTIVE, "all machines are provided", status=True)
    text = plan.waiting or _STATE_TEXTS.get(state, "")
    if state is QueuedResourceState.UNKNOWN and found is not None:
        text = (
            f"the cloud reports state {found.state}, which this version of the operator doesn't know: jobs wait, and "
            "the resource is left unchanged until the state changes or this object is deleted. Upgrade the operator if "
            "the state stays"
        )
    if found is not None and found.error_code:
        text = name_error(found.error_code, found.error_message)
    elif status.error is not None and status.error.code not in text:
        text = f"{text}{'; ' if text else ''}{status.error.code}: {status.error.message}"
    return ConditionUpdate(type=kind, status=False, reason=Reason(state.value), message=text)


def _derive_maintenance(view: View) -> ConditionUpdate | None:
    kind, now = _TYPES.MAINTENANCE_SCHEDULED, view.now
    nodes, listing = view.cloud.nodes, view.observed.listing
    if listing is None:
        return None
    current = tuple(n for n in nodes if n.maintenance is not None and not _is_over(n.maintenance, now=now))
    # If all of it is over, show the one that began last.
    found = find_next_maintenance(current, now=now) or find_next_maintenance(nodes, now=now)
    if found is None:
        if not nodes or listing.version is ApiVersion.V2ALPHA1:
            return ConditionUpdate(type=kind, status=False, reason=Reason.AS_EXPECTED)
        text = (
            f"maintenance is unknown, so jobs don't save before it: access to v2alpha1 of the Cloud TPU API is refused "
            f"({listing.refusal}). Give the operator's account access to v2alpha1"
        )
        return ConditionUpdate(type=kind, status=None, reason=Reason.NOT_REPORTED, message=text)
    more = f", and {len(current) - 1} more" if len(current) > 1 else ""
    node, maintenance = found
    text = f"slice {node.id}{more}: {_describe_window(maintenance, now=now)}"
    if not current:
        return ConditionUpdate(type=kind, status=False, reason=Reason.OVER, message=text)
    ongoing = [n.id for n in current if n.maintenance is not None and n.maintenance.is_ongoing]
    if ongoing and node.id not in ongoing:
        text += f"; maintenance of {name_some(ongoing)} is ongoing"
    reason = Reason.MAINTENANCE_ONGOING if ongoing else Reason.MAINTENANCE_ANNOUNCED
    return ConditionUpdate(kind, reason, text, status=True)


def _is_over(maintenance: CloudMaintenance, *, now: float) -> bool:
    """Return True once its window has ended, unless the cloud reports it as ongoing."""
    end = maintenance.window_end
    return not maintenance.is_ongoing and end is not None and end <= now


def _describe_window(maintenance: CloudMaintenance, *, now: float) -> str:
    start, end, ongoing = maintenance.window_start, maintenance.window_end, maintenance.is_ongoing
    times = []
    if start is not None:
        times.append(f"{'begins' if start > now else 'began'} at {render_time(start)}")
    if end is not None:
        times.append(f"{'ends' if end > now else 'ended'} at {render_time(end)}")
    late = ongoing and end is not None and end <= now
    window = f"{'though ' if late else ''}its window {' and '.join(times) or 'is unknown'}"
    saved = ". Jobs on it save before it begins" if start is not None and start > now and not ongoing else ""
    return f"{to_camel_case(maintenance.type)} maintenance is {to_camel_case(maintenance.status)}, {window}{saved}"


def _derive_quota(cloud: CloudView, status: QueuedResourceStatus) -> ConditionUpdate | None:
    kind, found, error = _TYPES.QUOTA_EXHAUSTED, cloud.resource, status.error
    text = ""
    if error is not None and error.verb != Verb.DELETE and error_kind(status) is ErrorKind.QUOTA:
        text = error.message
    elif found is not None and found.lacks_quota:
        text = found.error_message
    if text:
        due = status.next_try_time
        when = "" if due is None else f", next at {render_time(due)}"
        text = f"{text.rstrip('.')}. The request is retried{when}: free quota in the project, or request more"
        return ConditionUpdate(type=kind, status=True, reason=Reason.QUOTA_EXHAUSTED, message=text)
    granted = found is not None and found.phase in _GRANTED
    if granted or find_condition(status.conditions, kind) is None:
        return ConditionUpdate(type=kind, status=False, reason=Reason.AS_EXPECTED)
    return None


def conclude(
    before: QueuedResourceStatus,
    status: QueuedResourceStatus,
    plan: Plan,
    findings: Iterable[ConditionUpdate],
    view: View,
) -> Decision:
    """Turn the plan into a decision, with the conditions in the status, and events about the changes."""
    generation, unseen = view.meta.generation, not view.cloud.known and status.observed_generation is None
    conditions = merge_conditions(before.conditions, findings, _TYPES, generation=generation, now=view.now)
    # A status without a generation may have been emptied. It gets one with the first listing.
    changes = {"conditions": conditions, "observed_generation": None if unseen else generation}
    status = status.model_copy(update=changes)
    changed = status != before
    return Decision(
        status=status,
        write_status=changed,
        actions=plan.actions,
        events=(*plan.events, *_derive_events(before, status)) if changed else (),
        requeue_after_s=find_soonest(plan.requeue_after_s),
    )


def _derive_events(before: QueuedResourceStatus, after: QueuedResourceStatus) -> tuple[ObjectEvent, ...]:
    """List events about changes of state, conditions and errors. An error in a condition's event has no other event."""
    conditions = _derive_condition_events(before, after)
    excerpt = None if after.error is None else after.error.message[:_EXCERPT_LENGTH]
    known = excerpt is not None and any(excerpt in event.message for event in conditions)
    errors = () if known else _derive_error_event(before, after)
    return (*_derive_state_event(before, after), *conditions, *errors)


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
    events, another_window = [], after.next_maintenance_time not in {None, before.next_maintenance_time}
    for kind in _TYPES:
        earlier, now = find_condition(before.conditions, kind), find_condition(after.conditions, kind)
        if now is None:
            continue
        same = earlier is not None and (earlier.status, earlier.reason) == (now.status, now.reason)
        if same and not (kind is _TYPES.MAINTENANCE_SCHEDULED and another_window):
            continue
        bad = _BAD.get(kind) is now.status or now.reason == Reason.JOIN_TIMEOUT
        if bad or _GOOD.get(kind) is now.status:
            events.append(ObjectEvent(warning=bad, reason=now.reason, message=now.message))
    return tuple(events)


def _derive_error_event(before: QueuedResourceStatus, after: QueuedResourceStatus) -> tuple[ObjectEvent, ...]:
    earlier, now = before.error, after.error
    if now is None or (earlier is not None and (earlier.code, earlier.verb) == (now.code, now.verb)):
        return ()
    text = f"{now.verb}: {describe_error(after)}"
    return (ObjectEvent(warning=True, reason="CloudError", message=text),)
