"""Plan what happens to a cloud resource that exists: keep it, or remove it and make it anew. Pure."""

from dataclasses import replace
from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource import (
    QueuedResource,
    QueuedResourceSpec,
    UpdatePolicy,
)
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceBookkeeping,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource, ErrorKind
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.queued_resources.decide.adoption import judge_labels, plan_labels, uncordon_members
from stepkeeper_operator.queued_resources.decide.answers import book
from stepkeeper_operator.queued_resources.decide.ends import (
    EXPIRED,
    QUOTA,
    SPEC_CHANGED,
    VANISHED,
    End,
    find_end,
    find_objection,
)
from stepkeeper_operator.queued_resources.decide.mirror import to_state
from stepkeeper_operator.queued_resources.decide.problems import find_blocked_deletion, find_refusals
from stepkeeper_operator.queued_resources.decide.removal import begin_removal, plan_removal
from stepkeeper_operator.queued_resources.decision import Action, Plan, Problem
from stepkeeper_operator.queued_resources.pacing import compute_backoff_s, compute_poll_s, compute_retry_s
from stepkeeper_operator.queued_resources.request import hash_spec, was_changed
from stepkeeper_operator.queued_resources.sight import Scene

__all__ = ["find_gone_reason", "plan_present", "plan_replacement", "plan_vanished"]

_STEADY_S: Final = 3600
"""Seconds of being active after which recreations are counted anew."""

_REPLACED_ANYWAY: Final = {SPEC_CHANGED, QUOTA, "Suspended", "Preempted"}


def plan_present(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan for a cloud resource that exists and is ours."""
    sight, settings, now = scene.sight, scene.settings, scene.now
    cloud, spec = sight.resource, resource.spec
    assert cloud is not None  # the caller has seen it
    status = _note_active(status, cloud, now=now)
    problems: tuple[Problem, ...] = ()
    made_with = status.bookkeeping.spec_hash
    if made_with and was_changed(spec, made_with):
        if spec.update_policy is UpdatePolicy.RECREATE:
            changed = End(reason=SPEC_CHANGED, message="its spec has changed")
            return _replace(resource, status, changed, scene)
        text = "the spec asks for something else than the cloud resource was made with. Set updatePolicy: Recreate"
        problems = (Problem(reason="SpecDiffers", message=text),)
    end = find_end(spec, cloud, sight, status, now=now)
    if end is None:
        look_s = compute_poll_s(status.model_copy(update={"state": to_state(cloud.state)}), settings)
        actions: tuple[Action, ...] = (*plan_labels(resource, status, scene), *uncordon_members(scene))
        accepted = judge_labels(status, sight.unlabelled)
        if accepted is not None:
            look_s = settings.poll_fast_s
        return Plan(status=status, actions=actions, look_s=look_s, problems=problems, accepted=accepted)
    problem = None if end.reason == EXPIRED else find_objection(spec, status, end)
    if problem is not None:
        return Plan(status=status, look_s=settings.poll_waiting_s, problems=(*problems, problem))
    return _replace(resource, status, end, scene)


def plan_vanished(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan for a cloud resource that existed, and that somebody else has deleted."""
    end = End(reason=VANISHED, message="somebody else has deleted it from the cloud")
    return _replace(resource, status, end, scene)


def find_gone_reason(spec: QueuedResourceSpec, status: QueuedResourceStatus) -> Problem | None:
    """Find why a resource that was removed stays gone; None: it is to be made anew."""
    if was_changed(spec, status.bookkeeping.spec_hash):
        return None
    end = End(
        reason="Gone", message="the cloud resource was removed, since it has run out, failed or was deleted"
    )
    return find_objection(spec, status, end)


def plan_replacement(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan to remove the present one, and then to make it anew: what remains of it eats the quota of the next."""
    removal = plan_removal(status, scene)
    if not removal.done:
        why = status.bookkeeping.removing
        return Plan(
            status=status,
            actions=removal.actions,
            look_s=removal.look_s,
            waiting=f"it is removed ({why}): {removal.waiting}",
            problems=(*find_blocked_deletion(scene.meta, status), *find_refusals(scene.observed)),
        )
    return Plan(status=_finish(resource, status, scene), look_s=0.0, waiting="it is removed")


def _replace(
    resource: QueuedResource,
    status: QueuedResourceStatus,
    end: End,
    scene: Scene,
) -> Plan:
    plan = plan_replacement(resource, _begin(status, end, now=scene.now), scene)
    event = ObjectEvent(
        warning=end.reason != SPEC_CHANGED, reason=end.reason, message=f"{end.message}: it is removed"
    )
    return replace(plan, events=(event,))


def _begin(status: QueuedResourceStatus, end: End, *, now: float) -> QueuedResourceStatus:
    since = status.bookkeeping.active_since
    if since is not None and now - since >= _STEADY_S:
        status = book(status, streak=0)
    return begin_removal(status, end.reason, now=now)


def _finish(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    """Return the status after a removal: of the next cloud resource, or of none."""
    policy, before = resource.spec.recreate_policy, status.bookkeeping
    why = before.removing
    objection = find_objection(resource.spec, status, End(reason=why, message=""))
    stays_gone = why not in _REPLACED_ANYWAY and objection is not None
    counted = why not in {SPEC_CHANGED, QUOTA}
    wait_s = compute_backoff_s(policy.backoff, before.streak) if counted else 0.0
    n_quota = before.quota_failures
    if why == QUOTA:
        n_quota += 1
        wait_s = compute_retry_s(ErrorKind.QUOTA, n_quota, scene.settings)
    bookkeeping = before.model_copy(
        update={
            "number": before.number + 1,
            "created": False,
            "adopted": False,
            "adopting": "",
            "asked_at": None,
            "spec_hash": _keep_hash(resource.spec, before, why, stays_gone=stays_gone),
            "removing": "",
            "removing_since": None,
            "streak": before.streak + int(counted and not stays_gone),
            "not_before": int(scene.now + wait_s) if wait_s and not stays_gone else None,
            "active_since": None,
            "missing_since": None,
            "retries": 0,
            "failed_deletions": 0,
            "quota_failures": n_quota,
        }
    )
    return status.model_copy(
        update={
            "state": QueuedResourceState.GONE if stays_gone else QueuedResourceState.PENDING,
            "recreations": status.recreations + int(not stays_gone),
            "bookkeeping": bookkeeping,
            "operation": None,
            "error": None,
        }
    )


def _note_active(
    status: QueuedResourceStatus, cloud: CloudQueuedResource, *, now: float
) -> QueuedResourceStatus:
    if cloud.state != "ACTIVE" or status.bookkeeping.active_since is not None:
        return status
    return book(status, active_since=int(now), quota_failures=0)


def _keep_hash(
    spec: QueuedResourceSpec, before: QueuedResourceBookkeeping, why: str, *, stays_gone: bool
) -> str:
    """Return the hash by which a change of the spec is seen while the next one isn't asked for yet."""
    if stays_gone:
        known = before.spec_hash if spec.hides_changes() else ""
        return known or hash_spec(spec)
    return before.spec_hash if why == QUOTA else ""  # a smaller wish may be within the quota
