"""Decide what to do for one QueuedResource. Pure and idempotent: once a decision is applied, the next does nothing."""

from dataclasses import replace

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cloud_tpu.naming import FINALIZER, parse_number
from stepkeeper_operator.kinds.decision import find_soonest
from stepkeeper_operator.queued_resources.decide.adoption import plan_blocked
from stepkeeper_operator.queued_resources.decide.answers import describe_error, fold_answers, waits_to_delete
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
from stepkeeper_operator.queued_resources.sight import Scene, look_at
from stepkeeper_operator.queued_resources.subject import Subject

__all__ = ["decide_queued_resource"]


def decide_queued_resource(
    subject: Subject, observed: Observed, settings: CloudSettings, *, now: float
) -> Decision:
    """Decide what to write, what to ask of the cloud, and when to look again."""
    meta, before, resource = subject.meta, subject.status, subject.resource
    sight = look_at(observed, meta, before.operator)
    scene = Scene(meta=meta, observed=observed, sight=sight, settings=settings, now=now)
    if meta.deletion_timestamp is not None:
        return decide_deletion(before, scene, retain=subject.retain)
    assert resource is not None  # only one that is being deleted is managed without a spec
    status = fold_answers(before, scene)
    scene = _look_again(scene, before, status)
    plan = _plan(resource, status, scene)
    mine = plan.status.operator.created or plan.status.operator.adopting
    if mine and FINALIZER not in meta.finalizers:
        # The finalizer comes before anything in the cloud: the plan is made again once it is seen.
        return Decision(status=before, actions=(SetFinalizer(present=True),))
    return _compose(resource, plan, _look_again(scene, status, plan.status))


def _look_again(scene: Scene, before: QueuedResourceStatus, after: QueuedResourceStatus) -> Scene:
    """Return the scene as it is for the new status, by which another one may be the present cloud resource."""
    if before.operator == after.operator:
        return scene
    return replace(scene, sight=look_at(scene.observed, scene.meta, after.operator))


def _plan(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    sight, operator = scene.sight, status.operator
    is_gone = status.state is QueuedResourceState.DELETING and not sight.strays  # where its name is taken
    if status.removing and (sight.foreign is None or is_gone):
        return plan_replacement(resource, status, scene)
    if sight.strays:
        return _plan_strays(resource, status, scene)
    if sight.resource is not None:
        if operator.created and not (operator.adopting or operator.lost):
            return plan_present(resource, status, scene)
        return plan_recovery(resource, status, sight.resource)
    if not sight.known:
        return Plan(status=status, look_s=scene.settings.compute_poll_s(status))
    return _plan_absent(resource, status, scene)


def _plan_absent(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan while there is nothing under the present id, or something that isn't ours."""
    absent = scene.sight.absent
    if absent and status.operation is not None:
        text = "the cloud is working on the request"
        return Plan(status=status, look_s=scene.settings.poll_fast_s, waiting=text)
    if absent and status.operator.created and status.was_seen:
        return plan_vanished(resource, status, scene)
    if status.state is QueuedResourceState.GONE:
        why = find_gone_reason(resource.spec, status)
        if why is not None:
            return Plan(status=status, problems=(why,))
    return plan_blocked(resource, status, scene) or plan_creation(resource, status, scene)


def _plan_strays(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan for resources of ours under other ids than the present one: there must never be two.

    With an empty status, or one that is older than the cloud (somebody has restored it), the newest is what the status
    should show: the operator takes it up again. The others came from requests that were thought to be lost.
    """
    meta, operator = scene.meta, status.operator
    numbers = {each.id: parse_number(meta.namespace, meta.name, each.id) for each in scene.sight.strays}
    stray = max(scene.sight.strays, key=lambda each: numbers[each.id] or 0)
    number, empty = numbers[stray.id], status.observed_generation is None and not operator.created
    is_newer = number is not None and (empty or number > operator.number)
    if is_newer and scene.sight.resource is None:
        return plan_recovery(resource, status, stray)
    text = f"{stray.id} is an earlier one of this object; it is deleted"
    if status.error is not None and status.error.verb == Verb.DELETE and stray.state != "DELETING":
        text = f"{text}, and costs money until then: {describe_error(status)}"
    waits = stray.state == "DELETING" or waits_to_delete(status, now=scene.now)
    return Plan(
        status=status,
        actions=() if waits else (delete_resource(meta, status, stray),),
        look_s=scene.settings.poll_fast_s,
        problems=(Problem(reason=Reason.DUPLICATE_RESOURCE, message=text),),
    )


def _compose(resource: QueuedResource, plan: Plan, scene: Scene) -> Decision:
    """Fill in the status: the mirror of the cloud, and the conditions."""
    status = mirror_cloud(plan.status, scene)
    if status.state is None:
        status = status.model_copy(update={"state": QueuedResourceState.PENDING})
    status, joined, deadline_s = judge_joining(resource, status, scene)
    findings = [*derive_conditions(resource, plan, status, scene), *([] if joined is None else [joined])]
    due = status.next_try_time
    due_s = due - scene.now if due is not None and due > scene.now else None  # the status shows this time
    look_s = find_soonest(plan.look_s, deadline_s, due_s)
    return conclude(resource.status, status, replace(plan, look_s=look_s), findings, scene)
