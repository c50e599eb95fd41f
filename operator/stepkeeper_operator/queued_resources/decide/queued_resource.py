"""Decide what to do for one QueuedResource. Pure and idempotent: once a decision is applied, the next does nothing."""

from dataclasses import replace
from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import merge_conditions
from stepkeeper_operator.api.v1alpha1.queuedresource import DeletionPolicy, QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.pacing import find_soonest
from stepkeeper_operator.queued_resources.decide.adoption import is_lost, plan_blocked, plan_release
from stepkeeper_operator.queued_resources.decide.answers import (
    describe_error,
    fold_answers,
    waits_to_delete,
)
from stepkeeper_operator.queued_resources.decide.conditions import derive_conditions
from stepkeeper_operator.queued_resources.decide.creation import plan_creation, plan_recovery
from stepkeeper_operator.queued_resources.decide.deletion import decide_deletion
from stepkeeper_operator.queued_resources.decide.events import derive_events
from stepkeeper_operator.queued_resources.decide.joining import note_missing
from stepkeeper_operator.queued_resources.decide.lifecycle import (
    find_gone_reason,
    plan_present,
    plan_replacement,
    plan_vanished,
)
from stepkeeper_operator.queued_resources.decide.mirror import mirror_cloud
from stepkeeper_operator.queued_resources.decide.removal import delete_resource
from stepkeeper_operator.queued_resources.decision import Decision, Plan, Problem, SetFinalizer
from stepkeeper_operator.queued_resources.naming import FINALIZER, parse_number
from stepkeeper_operator.queued_resources.observed import Observed, Verb
from stepkeeper_operator.queued_resources.pacing import compute_poll_s
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.queued_resources.sight import Presence, Scene, Sight, look_at

__all__ = ["decide_queued_resource"]

_UNSEEN: Final = {None, QueuedResourceState.PENDING, QueuedResourceState.GONE}


def decide_queued_resource(
    resource: QueuedResource, observed: Observed, settings: CloudSettings, *, now: float
) -> Decision:
    """Decide what to write, what to ask of the cloud, and when to look again."""
    meta, before = resource.metadata, resource.status
    if meta.deletion_timestamp is not None:
        retain = resource.spec.deletion_policy is DeletionPolicy.RETAIN
        return decide_deletion(meta, before, observed, settings, retain=retain, now=now)
    sight = look_at(observed, meta, before.bookkeeping)
    scene = Scene(meta=meta, observed=observed, sight=sight, settings=settings, now=now)
    status = fold_answers(before, scene)
    if status.bookkeeping.number != before.bookkeeping.number:  # a failed creation: the next has another id
        scene = replace(scene, sight=look_at(observed, meta, status.bookkeeping))
    lost = is_lost(status, scene.sight)
    plan = plan_release(status, scene) if lost else _plan(resource, status, scene)
    mine = plan.status.bookkeeping.created or plan.status.bookkeeping.adopting
    if mine and FINALIZER not in meta.finalizers:
        # Nothing may be in the cloud that nobody would remove: the plan is made again once the finalizer is seen.
        return Decision(status=before, actions=(SetFinalizer(present=True),))
    return _compose(resource, plan, scene)


def _plan(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    sight, settings = scene.sight, scene.settings
    if status.bookkeeping.removing:
        return plan_replacement(resource, status, scene)
    if sight.strays:
        return _plan_strays(resource, status, scene)
    match sight.presence:
        case Presence.UNKNOWN:
            return Plan(status=status, look_s=compute_poll_s(status, settings))
        case Presence.FOREIGN:
            return plan_blocked(resource, status, scene) or plan_creation(resource, status, scene)
        case Presence.OURS:
            known = status.bookkeeping.created and not status.bookkeeping.adopting
            return (plan_present if known else plan_recovery)(resource, status, scene)
        case Presence.ABSENT:
            return _plan_absent(resource, status, scene)


def _plan_absent(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    if status.operation is not None:
        text = "the cloud is working on the request"
        return Plan(status=status, look_s=scene.settings.poll_fast_s, waiting=text)
    if status.bookkeeping.created and status.state not in _UNSEEN:
        return plan_vanished(resource, status, scene)
    if status.state is QueuedResourceState.GONE:
        why = find_gone_reason(resource.spec, status)
        if why is not None:
            return Plan(status=status, problems=(why,))
    return plan_blocked(resource, status, scene) or plan_creation(resource, status, scene)


def _plan_strays(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan for resources of ours under other ids than the present one: there must never be two.

    With an empty status, or one that is older than the cloud (somebody has restored it), the newest is what the status
    should tell of: the operator takes it up again. The others came from requests that were thought to be lost.
    """
    meta, bookkeeping, strays = scene.meta, status.bookkeeping, scene.sight.strays
    numbers = {stray.id: parse_number(meta.namespace, meta.name, stray.id) for stray in strays}
    stray = max(strays, key=lambda each: numbers[each.id] or 0)
    number = numbers[stray.id]
    empty = status.observed_generation is None and not bookkeeping.created
    is_newer = number is not None and (empty or number > bookkeeping.number)
    if is_newer and not scene.sight.is_ours:
        return plan_recovery(resource, status, replace(scene, sight=replace(scene.sight, resource=stray)))
    text = f"{stray.id} is an earlier one of this object; it is deleted"
    if status.error is not None and status.error.verb == Verb.DELETE and stray.state != "DELETING":
        text = f"{text}, and costs money until then: {describe_error(status)}"
    problem = Problem(reason="Stray", message=text)
    waits = stray.state == "DELETING" or waits_to_delete(status, now=scene.now)
    actions = () if waits else (delete_resource(meta, status, stray),)
    return Plan(status=status, actions=actions, look_s=scene.settings.poll_fast_s, problems=(problem,))


def _compose(resource: QueuedResource, plan: Plan, scene: Scene) -> Decision:
    """Fill in the status: the mirror of the cloud, and the conditions."""
    meta, before, status = resource.metadata, resource.status, plan.status
    if status.bookkeeping.number != before.bookkeeping.number:
        scene = replace(scene, sight=Sight(presence=Presence.ABSENT))  # what was seen is another one's
    status = mirror_cloud(status, scene)
    if status.state is None:
        status = status.model_copy(update={"state": QueuedResourceState.PENDING})
    status = note_missing(status, scene)
    findings, deadline_s = derive_conditions(resource, plan, status, scene)
    conditions = merge_conditions(
        before.conditions, findings, QueuedResourceConditionType, generation=meta.generation, now=scene.now
    )
    # Until the cloud was looked at, nobody knows whether an empty status is true.
    looked = scene.sight.presence is not Presence.UNKNOWN or status.observed_generation is not None
    generation = meta.generation if looked else None
    status = status.model_copy(update={"conditions": conditions, "observed_generation": generation})
    due = status.bookkeeping.not_before
    due_s = due - scene.now if due is not None and due > scene.now else None  # the status shows this time
    soonest_s = find_soonest(plan.look_s, deadline_s, due_s)
    if status == before:
        return Decision(status=status, actions=plan.actions, requeue_after_s=soonest_s)
    events = (*plan.events, *derive_events(before, status))
    return Decision(
        status=status, write_status=True, actions=plan.actions, events=events, requeue_after_s=soonest_s
    )
