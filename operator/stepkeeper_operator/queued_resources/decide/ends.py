"""Find out that a cloud resource will never be active again, and whether it is made anew. Pure."""

from dataclasses import dataclass
from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource import OnEnd, QueuedResourceSpec, TierSpec
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceStatus
from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource
from stepkeeper_operator.queued_resources.decision import Problem
from stepkeeper_operator.queued_resources.sight import Sight

__all__ = [
    "EXPIRED",
    "QUOTA",
    "SPEC_CHANGED",
    "VANISHED",
    "End",
    "find_end",
    "find_lost_states",
    "find_objection",
]

EXPIRED: Final = "Expired"
QUOTA: Final = "QuotaExhausted"
SPEC_CHANGED: Final = "SpecChanged"
VANISHED: Final = "Vanished"
_SUSPENSIONS: Final = {"Suspended", "Preempted"}
_WAITING_STATES: Final = {"ACCEPTED", "WAITING_FOR_RESOURCES", "CREATING"}
_EXPIRED_GRACE_S: Final = 60
"""Seconds that the cloud has to fail an expired request by itself."""

_LOST_STATES: Final = frozenset({"PREEMPTED", "TERMINATED"})
_STOPPED: Final = "STOPPED"
_TIME_OVER: Final = "DEADLINE_EXCEEDED"
_MISSING_S: Final = 120
"""Seconds after which all nodes of an active resource are listed; lists of nodes and of resources are two requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why a cloud resource will never be active again."""

    reason: str
    message: str


def find_end(
    spec: QueuedResourceSpec,
    cloud: CloudQueuedResource,
    sight: Sight,
    status: QueuedResourceStatus,
    *,
    now: float,
) -> End | None:
    deadline = _find_deadline(spec, cloud)
    match cloud.state:
        case "SUSPENDED":
            who = {"USER": "a user", "SERVICE": "the cloud"}.get(cloud.initiator, "somebody")
            return End(reason="Suspended", message=f"{who} has suspended it")
        case "FAILED":
            over = deadline is not None and now >= deadline and status.bookkeeping.active_since is None
            if over and cloud.error_code in {"", _TIME_OVER}:
                return End(reason=EXPIRED, message="its request has run out")
            text = (
                f"{cloud.error_code}: {cloud.error_message}"
                if cloud.error_code
                else "the cloud doesn't say why"
            )
            reason = QUOTA if cloud.error_code == "RESOURCE_EXHAUSTED" else "Failed"
            return End(reason=reason, message=f"it has failed: {text}")
        case "ACTIVE":
            lost = _find_lost_nodes(spec, cloud, sight, status, now=now)
            return End(reason="Preempted", message="; ".join(lost)) if lost else None
        case state if (
            state in _WAITING_STATES and deadline is not None and now >= deadline + _EXPIRED_GRACE_S
        ):
            return End(reason=EXPIRED, message="its request has run out")
        case _:
            return None


def find_lost_states(tier: TierSpec) -> frozenset[str]:
    """Find the states from which a node doesn't come back.

    The cloud doesn't always call a node PREEMPTED that it took away: STOPPED means the same on machines that it may
    take at any time, since the operator stops none. Guaranteed ones are stopped by people, who start them again.
    """
    return _LOST_STATES if tier.guaranteed is not None else _LOST_STATES | {_STOPPED}


def _find_lost_nodes(
    spec: QueuedResourceSpec,
    cloud: CloudQueuedResource,
    sight: Sight,
    status: QueuedResourceStatus,
    *,
    now: float,
) -> list[str]:
    """Describe the nodes that never come back by themselves."""
    states = find_lost_states(spec.tier)
    lost = [f"node {node.id} is {node.state}" for node in sight.nodes if node.state in states]
    since = status.bookkeeping.active_since
    if since is not None and now - since >= _MISSING_S:
        listed = {node.id for node in sight.nodes}
        lost += [f"node {node_id} doesn't exist" for node_id in cloud.node_ids if node_id not in listed]
    return lost


def find_objection(spec: QueuedResourceSpec, status: QueuedResourceStatus, end: End) -> Problem | None:
    """Find why a resource that has ended isn't made anew; None: it is."""
    policy = spec.recreate_policy
    field, chosen = (
        ("onSuspended", policy.on_suspended) if end.reason in _SUSPENSIONS else ("onFailed", policy.on_failed)
    )
    if chosen is OnEnd.KEEP and end.reason != QUOTA:
        text = (
            f"{end.message}, and recreatePolicy.{field} is Keep. What remains of it eats quota, and may cost money. "
            f"Set {field}: Recreate, or delete this object"
        )
        return Problem(reason=end.reason, message=text)
    streak = status.bookkeeping.streak
    if policy.max is not None and streak >= policy.max and end.reason != QUOTA:
        text = (
            f"{end.message}, after {streak} recreations in a row without an hour of being active. "
            "Raise recreatePolicy.max, or delete this object"
        )
        return Problem(reason="RecreationsExhausted", message=text)
    return None


def _find_deadline(spec: QueuedResourceSpec, cloud: CloudQueuedResource) -> int | None:
    """Find the time at which the request runs out."""
    if spec.queueing is None:
        return None
    if spec.queueing.valid_until_seconds is not None:
        return None if cloud.create_time is None else cloud.create_time + spec.queueing.valid_until_seconds
    return spec.queueing.end_time
