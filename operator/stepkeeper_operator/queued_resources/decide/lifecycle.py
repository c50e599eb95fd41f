"""Plan for an existing cloud resource: keep it, or remove and recreate it. Pure.

Its end is the reason why it can't become active again. An objection is the reason why it isn't recreated after that.
"""

from dataclasses import replace
from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource import (
    OnEnd,
    QueuedResource,
    QueuedResourceSpec,
    UpdatePolicy,
)
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceState,
    QueuedResourceStatus,
    ResourceOperatorState,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource, ErrorKind, to_camel_case
from stepkeeper_operator.cloud_tpu.request import was_changed
from stepkeeper_operator.kinds.decision import ObjectEvent
from stepkeeper_operator.queued_resources.cloud_view import View
from stepkeeper_operator.queued_resources.decide.adoption import judge_labels, plan_labels, uncordon_members
from stepkeeper_operator.queued_resources.decide.answers import name_error, update_status
from stepkeeper_operator.queued_resources.decide.mirror import is_lost
from stepkeeper_operator.queued_resources.decide.removal import begin_removal, plan_removal
from stepkeeper_operator.queued_resources.decision import Action, Plan, Problem

__all__ = ["find_gone_reason", "plan_present", "plan_replacement", "plan_vanished"]

_SUSPENSIONS: Final = {Reason.SUSPENDED, Reason.PREEMPTED}
_WAITING_STATES: Final = {
    QueuedResourceState.ACCEPTED,
    QueuedResourceState.WAITING,
    QueuedResourceState.CREATING,
}
_EXPIRED_GRACE_S: Final = 60
"""Seconds that the cloud has to fail an expired request itself."""

_MISSING_S: Final = 120
"""Seconds after which all nodes of an active resource must be listed: nodes and resources are in separate lists."""
_STABLE_S: Final = 3600
"""Seconds of being active after which the count of recreations starts over."""

_MAX_DOUBLINGS: Final = 20
_ALWAYS_RECREATED: Final = _SUSPENSIONS | {Reason.SPEC_CHANGED, Reason.QUOTA_EXHAUSTED}
"""A removal for these reasons begins only to recreate the resource. For others, the spec decides after it."""


def plan_present(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> Plan:
    """Plan for an existing, own cloud resource."""
    found, spec = view.cloud.resource, resource.spec
    assert found is not None  # the caller has checked
    if found.phase is QueuedResourceState.ACTIVE and status.active_since is None:
        status = update_status(status, active_since=int(view.now), quota_failures=0)
    problems: tuple[Problem, ...] = ()
    if was_changed(spec, status):
        if spec.update_policy is UpdatePolicy.RECREATE:
            changed = Problem(reason=Reason.SPEC_CHANGED, message="its spec has changed")
            return _replace(resource, status, changed, view)
        text = "the spec differs from the cloud resource. Set updatePolicy: Recreate to replace the resource"
        problems = (Problem(reason=Reason.SPEC_MISMATCH, message=text),)
    end = _find_end(spec, found, status, view)
    if end is None:
        status = status.model_copy(update={"state": found.phase})
        return _plan_to_keep(resource, status, problems, view)
    # An expired request is always removed. Whether another one follows is decided after that.
    objection = None if end.reason == Reason.EXPIRED else _find_objection(spec, status, end)
    if objection is None:
        return _replace(resource, status, end, view)
    return Plan(status=status, requeue_after_s=view.settings.poll_waiting_s, problems=(*problems, objection))


def plan_vanished(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> Plan:
    """Plan for a cloud resource that was deleted from outside."""
    end = Problem(reason=Reason.VANISHED, message="the cloud resource was deleted outside of the operator")
    return _replace(resource, status, end, view)


def find_gone_reason(spec: QueuedResourceSpec, status: QueuedResourceStatus) -> Problem | None:
    """Find why a removed resource isn't recreated; None: it is."""
    text = "the cloud resource has expired, failed or was deleted, and was removed"
    changed = was_changed(spec, status)
    return None if changed else _find_objection(spec, status, Problem(reason=Reason.GONE, message=text))


def plan_replacement(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> Plan:
    """Plan to remove the current one before the next is created: its leftovers would use the quota."""
    plan = plan_removal(status, view)
    if plan is None:
        return Plan(status=_finish(resource, status, view), requeue_after_s=0.0)
    return replace(plan, waiting=f"the cloud resource is being removed ({status.removing}): {plan.waiting}")


def _plan_to_keep(
    resource: QueuedResource, status: QueuedResourceStatus, problems: tuple[Problem, ...], view: View
) -> Plan:
    """Keep the resource. While the operator sets its label on nodes, `Accepted` reports that, and polls are fast."""
    actions: tuple[Action, ...] = (*plan_labels(resource, status, view), *uncordon_members(view))
    accepted, settings = judge_labels(status, view.cloud.unlabeled), view.settings
    again_s = settings.compute_poll_s(status) if accepted is None else settings.poll_fast_s
    return Plan(status=status, actions=actions, requeue_after_s=again_s, problems=problems, accepted=accepted)


def _replace(resource: QueuedResource, status: QueuedResourceStatus, end: Problem, view: View) -> Plan:
    since = status.active_since
    if since is not None and view.now - since >= _STABLE_S:
        status = update_status(status, streak=0)
    plan = plan_replacement(resource, begin_removal(status, end.reason, now=view.now), view)
    bad, text = end.reason != Reason.SPEC_CHANGED, f"{end.message}; the operator removes it"
    return replace(plan, events=(ObjectEvent(warning=bad, reason=end.reason, message=text),))


def _finish(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> QueuedResourceStatus:
    """Return the status after a removal, for the next cloud resource or for none."""
    spec, before, why = resource.spec, status.operator, Reason(status.removing)
    n_quota = before.quota_failures + (why == Reason.QUOTA_EXHAUSTED)
    objection = _find_objection(spec, status, Problem(reason=why, message=""))
    stays_gone = why not in _ALWAYS_RECREATED and objection is not None
    # Recreations after a change of the spec or for lack of quota don't count towards recreatePolicy.max.
    counts = not stays_gone and why not in {Reason.SPEC_CHANGED, Reason.QUOTA_EXHAUSTED}
    wait_s = 0.0
    if counts:
        backoff = spec.recreate_policy.backoff
        wait_s = min(backoff.max_seconds, backoff.initial_seconds * 2 ** min(before.streak, _MAX_DOUBLINGS))
    elif why == Reason.QUOTA_EXHAUSTED:
        wait_s = view.settings.compute_retry_s(ErrorKind.QUOTA, n_quota)
    operator = ResourceOperatorState(
        number=before.number + 1,
        spec_hash=before.spec_hash,
        streak=before.streak + counts,
        quota_failures=n_quota,
    )
    return status.model_copy(
        update={
            "state": QueuedResourceState.GONE if stays_gone else QueuedResourceState.PENDING,
            "recreations": status.recreations + (not stays_gone),
            "operator": operator,
            "next_try_time": int(view.now + wait_s) if wait_s else None,
            "removal": None,
            "active_since": None,
            "operation": None,
            "error": None,
        }
    )


def _find_end(
    spec: QueuedResourceSpec, found: CloudQueuedResource, status: QueuedResourceStatus, view: View
) -> Problem | None:
    """Find why the current one can't become active again; None: it can."""
    expires_at = _find_expiry(spec, found)
    late_s = float("-inf") if expires_at is None else view.now - expires_at
    expired = Problem(reason=Reason.EXPIRED, message="the request has expired")
    if found.phase is QueuedResourceState.SUSPENDED:
        by = f" by {found.suspended_by}" if found.suspended_by else ""
        return Problem(reason=Reason.SUSPENDED, message=f"the cloud resource was suspended{by}")
    if found.phase is QueuedResourceState.FAILED:
        over = late_s >= 0 and status.active_since is None
        return expired if over and not found.has_other_error else _describe_failure(found)
    if found.phase is QueuedResourceState.ACTIVE:
        lost = _find_lost_nodes(spec, found, status, view)
        return Problem(reason=Reason.PREEMPTED, message="; ".join(lost)) if lost else None
    return expired if found.phase in _WAITING_STATES and late_s >= _EXPIRED_GRACE_S else None


def _find_objection(spec: QueuedResourceSpec, status: QueuedResourceStatus, end: Problem) -> Problem | None:
    """Find why an ended resource isn't recreated; None: it is."""
    if end.reason == Reason.QUOTA_EXHAUSTED:
        return None
    policy, streak = spec.recreate_policy, status.operator.streak
    suspended = end.reason in _SUSPENSIONS
    field, chosen = ("onSuspended", policy.on_suspended) if suspended else ("onFailed", policy.on_failed)
    if chosen is OnEnd.KEEP:
        gone = end.reason == Reason.GONE
        rest = "Nothing is left in the cloud" if gone else "The rest of it uses quota, and may cost money"
        text = (
            f"{end.message}, and recreatePolicy.{field} is Keep. {rest}. "
            f"Set {field}: Recreate to request it again, or delete this object"
        )
        return Problem(reason=end.reason, message=text)
    if policy.max is None or streak < policy.max:
        return None
    text = (
        f"{end.message}, after {streak} consecutive recreations without an hour of being active. "
        "Raise recreatePolicy.max, or delete this object"
    )
    return Problem(reason=Reason.RECREATIONS_EXHAUSTED, message=text)


def _describe_failure(found: CloudQueuedResource) -> Problem:
    reason = Reason.QUOTA_EXHAUSTED if found.lacks_quota else Reason.FAILED
    text = name_error(found.error_code or "FAILED", found.error_message)
    return Problem(reason=reason, message=f"the cloud resource has failed: {text}")


def _find_lost_nodes(
    spec: QueuedResourceSpec, found: CloudQueuedResource, status: QueuedResourceStatus, view: View
) -> list[str]:
    """Describe the slices that can't recover."""
    nodes, since = view.cloud.nodes, status.active_since
    lost = [f"slice {node.id} is {to_camel_case(node.state)}" for node in nodes if is_lost(node, spec.tier)]
    if since is not None and view.now - since >= _MISSING_S:
        listed = {node.id for node in nodes}
        lost += [f"slice {node_id} doesn't exist" for node_id in found.node_ids if node_id not in listed]
    return lost


def _find_expiry(spec: QueuedResourceSpec, found: CloudQueuedResource) -> int | None:
    if spec.queueing is None:
        return None
    if spec.queueing.valid_until_seconds is None:
        return spec.queueing.valid_until_time
    return None if found.create_time is None else found.create_time + spec.queueing.valid_until_seconds
