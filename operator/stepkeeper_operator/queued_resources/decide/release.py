"""Let go of a cloud resource that another object has taken over. It isn't touched again. Pure."""

from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.queued_resources.decide.answers import book
from stepkeeper_operator.queued_resources.decision import Plan, Uncordon
from stepkeeper_operator.queued_resources.sight import Presence, Scene, Sight, identify

__all__ = ["is_lost", "is_released", "plan_release", "release", "uncordon_members"]

_MOST_RELEASED: Final = 64


def is_lost(status: QueuedResourceStatus, sight: Sight) -> bool:
    """Check whether what was the object's carries another label now."""
    unseen = {None, QueuedResourceState.PENDING, QueuedResourceState.GONE, QueuedResourceState.DELETING}
    had = status.bookkeeping.adopted or status.state not in unseen
    return sight.presence is Presence.FOREIGN and status.bookkeeping.created and had


def is_released(status: QueuedResourceStatus, sight: Sight) -> bool:
    """Check whether what is under the present id was let go: the nodes of the cluster are on another's machines."""
    if sight.resource is None or sight.presence is not Presence.FOREIGN:
        return False
    return identify(sight.resource) in status.bookkeeping.released


def plan_release(status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Let go of what carries another label now. It isn't touched again, unless somebody asks for it again."""
    changes: dict[str, Any] = {"removing": "", "removing_since": None, "active_since": None}
    after = book(release(status, scene.sight), missing_since=None, **changes)
    pending = {"state": QueuedResourceState.PENDING, "operation": None, "error": None}
    text = f"{status.cloud_name} doesn't carry this object's label any more: it is left alone"
    event = ObjectEvent(warning=True, reason="LetGo", message=text)
    return Plan(
        status=after.model_copy(update=pending), actions=uncordon_members(scene), look_s=0.0, events=(event,)
    )


def release(status: QueuedResourceStatus, sight: Sight) -> QueuedResourceStatus:
    """Note that the present one isn't the object's any more, whatever its request's label says."""
    assert sight.resource is not None  # the caller has seen it
    before, identity = status.bookkeeping.released, identify(sight.resource)
    released = (*(each for each in before if each != identity), identity)[-_MOST_RELEASED:]
    return book(status, created=False, adopted=True, adopting="", released=released)


def uncordon_members(scene: Scene) -> tuple[Uncordon, ...]:
    """Take back the cordons of a removal that came to nothing, such as one that a lost status told of."""
    return tuple(Uncordon(member=member) for member in scene.observed.members if member.cordoned_by_us)
