"""Decide what to do for one QueuedResource. Pure and idempotent: after a decision is applied, the next does nothing."""

from dataclasses import replace

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cloud_tpu.naming import FINALIZER, parse_number
from stepkeeper_operator.kinds.decision import find_soonest
from stepkeeper_operator.queued_resources.cloud_view import View, classify
from stepkeeper_operator.queued_resources.decide.adoption import plan_blocked
from stepkeeper_operator.queued_resources.decide.answers import (
    describe_blindness,
    describe_error,
    fold_answers,
    waits_to_delete,
)
from stepkeeper_operator.queued_resources.decide.conditions import conclude, derive_conditions
from stepkeeper_operator.queued_resources.decide.creation import plan_creation, plan_recovery
from stepkeeper_operator.queued_resources.decide.joining import judge_joining
from stepkeeper_operator.queued_resources.decide.lifecycle import (
    find_gone_reason,
    plan_present,
    plan_replacement,
    plan_vanished,
)
from stepkeeper_operator.queued_resources.decide.mirror import mirror_cloud
from stepkeeper_operator.queued_resources.decide.removal import decide_deletion, delete_resource
from stepkeeper_operator.queued_resources.decision import Decision, Plan, Problem, SetFinalizer
from stepkeeper_operator.queued_resources.observed import Observed, Verb
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.queued_resources.subject import Subject

__all__ = ["decide_queued_resource"]


def decide_queued_resource(
    subject: Subject, observed: Observed, settings: CloudSettings, *, now: float
) -> Decision:
    """Decide what to write, what to request from the cloud, and when to reconcile again."""
    meta, before, resource = subject.meta, subject.status, subject.resource
    cloud = classify(observed, meta, before.operator)
    view = View(meta=meta, observed=observed, cloud=cloud, settings=settings, now=now)
    if meta.deletion_timestamp is not None:
        return decide_deletion(before, view, retain=subject.retain)
    assert resource is not None  # without a spec, only a deletion is decided
    status = fold_answers(before, view)
    view = _reclassify(view, before, status)
    plan = _plan(resource, status, view)
    mine = plan.status.operator.created or plan.status.operator.adopting
    if mine and FINALIZER not in meta.finalizers:
        # Set the finalizer before any request to the cloud. The plan is made again once the object has it.
        return Decision(status=before, actions=(SetFinalizer(present=True),))
    return _compose(resource, plan, _reclassify(view, status, plan.status))


def _reclassify(view: View, before: QueuedResourceStatus, after: QueuedResourceStatus) -> View:
    """Return the view for the new status, with which another cloud resource may be the current one."""
    if before.operator == after.operator:
        return view
    return replace(view, cloud=classify(view.observed, view.meta, after.operator))


def _plan(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> Plan:
    cloud, operator = view.cloud, status.operator
    # If another object owns the resource now, the removal ends, unless this is a new one with the id of a deleted one.
    deleted = status.state is QueuedResourceState.DELETING and not cloud.duplicates
    if status.removing and (cloud.foreign is None or deleted):
        return plan_replacement(resource, status, view)
    if cloud.duplicates:
        return _plan_duplicates(resource, status, view)
    if cloud.resource is not None:
        if operator.created and not (operator.adopting or operator.lost):  # the status shows it
            return plan_present(resource, status, view)
        return plan_recovery(resource, status, cloud.resource)
    if not cloud.known:
        again_s = view.settings.compute_poll_s(status)
        text = describe_blindness(view.observed.error, again_s=again_s)
        return Plan(status=status, requeue_after_s=again_s, waiting=text)
    return _plan_absent(resource, status, view)


def _plan_absent(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> Plan:
    """Plan while there is nothing under the current id, or another object's resource."""
    absent = view.cloud.absent
    if absent and status.operation is not None:
        text = "the cloud is processing the request"
        return Plan(status=status, requeue_after_s=view.settings.poll_fast_s, waiting=text)
    if absent and status.operator.created and status.was_seen:
        return plan_vanished(resource, status, view)
    if status.state is QueuedResourceState.GONE:
        why = find_gone_reason(resource.spec, status)
        if why is not None:
            return Plan(status=status, problems=(why,))
    return plan_blocked(resource, status, view) or plan_creation(resource, status, view)


def _plan_duplicates(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> Plan:
    """Plan for own resources under other ids than the current one: there must never be two.

    If the status is empty or older than the cloud (it was restored), the newest resource becomes the current one
    again. The others come from requests that were considered lost.
    """
    meta, operator = view.meta, status.operator
    numbers = {each.id: parse_number(meta.namespace, meta.name, each.id) for each in view.cloud.duplicates}
    duplicate = max(view.cloud.duplicates, key=lambda each: numbers[each.id] or 0)
    number, empty = numbers[duplicate.id], status.observed_generation is None and not operator.created
    is_newer = number is not None and (empty or number > operator.number)
    if is_newer and view.cloud.resource is None:
        return plan_recovery(resource, status, duplicate)
    deleting = duplicate.phase is QueuedResourceState.DELETING
    text = f"{duplicate.id} is an earlier cloud resource of this object; it is deleted"
    if status.error is not None and status.error.verb == Verb.DELETE and not deleting:
        text = f"{text}, and costs money until then: {describe_error(status)}"
    waits = deleting or waits_to_delete(status, now=view.now)
    return Plan(
        status=status,
        actions=() if waits else (delete_resource(meta, status, duplicate),),
        requeue_after_s=view.settings.poll_fast_s,
        problems=(Problem(reason=Reason.DUPLICATE_RESOURCE, message=text),),
    )


def _compose(resource: QueuedResource, plan: Plan, view: View) -> Decision:
    """Complete the status with the mirror of the cloud and the conditions."""
    status = mirror_cloud(plan.status, view)
    if status.state is None:
        status = status.model_copy(update={"state": QueuedResourceState.PENDING})
    status, joined, deadline_s = judge_joining(resource, status, view)
    findings = [*derive_conditions(resource, plan, status, view), *([] if joined is None else [joined])]
    due = status.next_try_time
    due_s = due - view.now if due is not None and due > view.now else None  # the status shows this time
    requeue_after_s = find_soonest(plan.requeue_after_s, deadline_s, due_s)
    return conclude(resource.status, status, replace(plan, requeue_after_s=requeue_after_s), findings, view)
