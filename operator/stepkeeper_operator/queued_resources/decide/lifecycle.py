"""Plan what happens to a cloud resource that exists: keep it, or remove and recreate it. Pure."""

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
from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource, ErrorKind
from stepkeeper_operator.cloud_tpu.request import was_changed
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.queued_resources.decide.adoption import judge_labels, plan_labels, uncordon_members
from stepkeeper_operator.queued_resources.decide.answers import book, name_error
from stepkeeper_operator.queued_resources.decide.mirror import find_lost_states, to_state, to_word
from stepkeeper_operator.queued_resources.decide.removal import begin_removal, plan_removal
from stepkeeper_operator.queued_resources.decision import Action, Plan, Problem
from stepkeeper_operator.queued_resources.sight import Scene

__all__ = ["find_gone_reason", "plan_present", "plan_replacement", "plan_vanished"]

_SUSPENSIONS: Final = {Reason.SUSPENDED, Reason.PREEMPTED}
_WAITING_STATES: Final = {"ACCEPTED", "WAITING_FOR_RESOURCES", "CREATING"}
_EXPIRED_GRACE_S: Final = 60
"""Seconds that the cloud has to fail an expired request by itself."""

_TIME_OVER: Final = "DEADLINE_EXCEEDED"
_MISSING_S: Final = 120
"""Seconds after which all nodes of an active resource are listed; lists of nodes and of resources are two requests."""
_STEADY_S: Final = 3600
"""Seconds of being active after which the count of recreations starts again."""

_MOST_DOUBLINGS: Final = 20
_REPLACED_ANYWAY: Final = _SUSPENSIONS | {Reason.SPEC_CHANGED, Reason.QUOTA_EXHAUSTED}


def plan_present(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan for a cloud resource that exists and is ours."""
    cloud, spec = scene.sight.resource, resource.spec
    assert cloud is not None  # the caller has seen it
    if cloud.state == "ACTIVE" and status.active_since is None:
        status = book(status, active_since=int(scene.now), quota_failures=0)
    problems: tuple[Problem, ...] = ()
    if was_changed(spec, status.operator.spec_hash):
        if spec.update_policy is UpdatePolicy.RECREATE:
            changed = Problem(reason=Reason.SPEC_CHANGED, message="its spec has changed")
            return _replace(resource, status, changed, scene)
        text = "the spec asks for something else than the cloud resource was made with. Set updatePolicy: Recreate"
        problems = (Problem(reason=Reason.SPEC_MISMATCH, message=text),)
    end = _find_end(spec, cloud, status, scene)
    if end is None:
        status = status.model_copy(update={"state": to_state(cloud.state)})
        return _plan_to_keep(resource, status, problems, scene)
    problem = None if end.reason == Reason.EXPIRED else _find_objection(spec, status, end)
    if problem is None:
        return _replace(resource, status, end, scene)
    return Plan(status=status, look_s=scene.settings.poll_waiting_s, problems=(*problems, problem))


def plan_vanished(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan for a cloud resource that existed, and that somebody else has deleted."""
    end = Problem(reason=Reason.VANISHED, message="someone else has deleted it from the cloud")
    return _replace(resource, status, end, scene)


def find_gone_reason(spec: QueuedResourceSpec, status: QueuedResourceStatus) -> Problem | None:
    """Find why a resource that was removed stays gone; None: it is to be recreated."""
    text = "the cloud resource has expired, failed or was deleted, and is removed"
    changed = was_changed(spec, status.operator.spec_hash)
    return None if changed else _find_objection(spec, status, Problem(reason=Reason.GONE, message=text))


def plan_replacement(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan to remove the present one, and then to recreate it: what remains of it eats the quota of the next."""
    plan = plan_removal(status, scene)
    if plan is None:
        return Plan(status=_finish(resource, status, scene), look_s=0.0, waiting="")
    return replace(plan, waiting=f"the cloud resource is being removed ({status.removing}): {plan.waiting}")


def _plan_to_keep(
    resource: QueuedResource, status: QueuedResourceStatus, problems: tuple[Problem, ...], scene: Scene
) -> Plan:
    actions: tuple[Action, ...] = (*plan_labels(resource, status, scene), *uncordon_members(scene))
    accepted, settings = judge_labels(status, scene.sight.unlabelled), scene.settings
    look_s = settings.compute_poll_s(status) if accepted is None else settings.poll_fast_s
    return Plan(status=status, actions=actions, look_s=look_s, problems=problems, accepted=accepted)


def _replace(resource: QueuedResource, status: QueuedResourceStatus, end: Problem, scene: Scene) -> Plan:
    since = status.active_since
    if since is not None and scene.now - since >= _STEADY_S:
        status = book(status, streak=0)
    plan = plan_replacement(resource, begin_removal(status, end.reason, now=scene.now), scene)
    bad, text = end.reason != Reason.SPEC_CHANGED, f"{end.message}: it is removed"
    return replace(plan, events=(ObjectEvent(warning=bad, reason=end.reason, message=text),))


def _finish(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    """Return the status after a removal: of the next cloud resource, or of none."""
    spec, before, why = resource.spec, status.operator, Reason(status.removing)
    n_quota = before.quota_failures + (why == Reason.QUOTA_EXHAUSTED)
    objection = _find_objection(spec, status, Problem(reason=why, message=""))
    stays_gone = why not in _REPLACED_ANYWAY and objection is not None
    counts = not stays_gone and why not in {Reason.SPEC_CHANGED, Reason.QUOTA_EXHAUSTED}
    wait_s = 0.0
    if counts:
        backoff = spec.recreate_policy.backoff
        wait_s = min(backoff.max_seconds, backoff.initial_seconds * 2 ** min(before.streak, _MOST_DOUBLINGS))
    elif why == Reason.QUOTA_EXHAUSTED:
        wait_s = scene.settings.compute_retry_s(ErrorKind.QUOTA, n_quota)
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
            "next_try_time": int(scene.now + wait_s) if wait_s else None,
            "removal": None,
            "active_since": None,
            "operation": None,
            "error": None,
        }
    )


def _find_end(
    spec: QueuedResourceSpec, cloud: CloudQueuedResource, status: QueuedResourceStatus, scene: Scene
) -> Problem | None:
    """Find why the present one will never be active again; None: it may be."""
    deadline = _find_deadline(spec, cloud)
    late_s = float("-inf") if deadline is None else scene.now - deadline
    expired = Problem(reason=Reason.EXPIRED, message="its request has run out")
    if cloud.state == "SUSPENDED":
        who = {"USER": "a user", "SERVICE": "the cloud"}.get(cloud.initiator, "someone")
        return Problem(reason=Reason.SUSPENDED, message=f"{who} has suspended it")
    if cloud.state == "FAILED":
        over = late_s >= 0 and status.active_since is None
        return expired if over and cloud.error_code in {"", _TIME_OVER} else _describe_failure(cloud)
    if cloud.state == "ACTIVE":
        lost = _find_lost_nodes(spec, cloud, status, scene)
        return Problem(reason=Reason.PREEMPTED, message="; ".join(lost)) if lost else None
    return expired if cloud.state in _WAITING_STATES and late_s >= _EXPIRED_GRACE_S else None


def _find_objection(spec: QueuedResourceSpec, status: QueuedResourceStatus, end: Problem) -> Problem | None:
    """Find why a resource that has ended isn't recreated; None: it is."""
    if end.reason == Reason.QUOTA_EXHAUSTED:
        return None
    policy, streak = spec.recreate_policy, status.operator.streak
    suspended = end.reason in _SUSPENSIONS
    field, chosen = ("onSuspended", policy.on_suspended) if suspended else ("onFailed", policy.on_failed)
    if chosen is OnEnd.KEEP:
        gone = end.reason == Reason.GONE
        rest = (
            "Nothing of it is left in the cloud"
            if gone
            else "What remains of it uses quota, and may cost money"
        )
        text = (
            f"{end.message}, and recreatePolicy.{field} is Keep. {rest}. "
            f"Set {field}: Recreate to request it again, or delete this object"
        )
        return Problem(reason=end.reason, message=text)
    if policy.max is None or streak < policy.max:
        return None
    text = (
        f"{end.message}, after {streak} recreations in a row without an hour of being active. "
        "Raise recreatePolicy.max, or delete this object"
    )
    return Problem(reason=Reason.RECREATIONS_EXHAUSTED, message=text)


def _describe_failure(cloud: CloudQueuedResource) -> Problem:
    reason = Reason.QUOTA_EXHAUSTED if cloud.error_code == "RESOURCE_EXHAUSTED" else Reason.FAILED
    text = name_error(cloud.error_code or "FAILED", cloud.error_message)
    return Problem(reason=reason, message=f"it has failed: {text}")


def _find_lost_nodes(
    spec: QueuedResourceSpec, cloud: CloudQueuedResource, status: QueuedResourceStatus, scene: Scene
) -> list[str]:
    """Describe the slices that never come back by themselves."""
    states, nodes, since = find_lost_states(spec.tier), scene.sight.nodes, status.active_since
    lost = [f"slice {node.id} is {to_word(node.state)}" for node in nodes if node.state in states]
    if since is not None and scene.now - since >= _MISSING_S:
        listed = {node.id for node in nodes}
        lost += [f"slice {node_id} doesn't exist" for node_id in cloud.node_ids if node_id not in listed]
    return lost


def _find_deadline(spec: QueuedResourceSpec, cloud: CloudQueuedResource) -> int | None:
    """Find the time at which the request runs out."""
    if spec.queueing is None:
        return None
    if spec.queueing.valid_until_seconds is None:
        return spec.queueing.valid_until_time
    return None if cloud.create_time is None else cloud.create_time + spec.queueing.valid_until_seconds
