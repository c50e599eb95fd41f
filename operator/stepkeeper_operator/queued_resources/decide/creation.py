"""Plan what happens while the cloud has nothing of ours under the present id: create, or say why not. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.labels import ADOPT_ANNOTATION, QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.decide.answers import book
from stepkeeper_operator.queued_resources.decide.problems import find_refusals
from stepkeeper_operator.queued_resources.decide.removal import delete_nodes
from stepkeeper_operator.queued_resources.decision import CreateCloudResource, Plan
from stepkeeper_operator.queued_resources.naming import (
    UID_LABEL,
    make_cloud_id,
    make_cloud_name,
    parse_number,
)
from stepkeeper_operator.queued_resources.request import (
    build_request,
    choose_api_version,
    hash_spec,
    place_of,
    was_changed,
)
from stepkeeper_operator.queued_resources.sight import Scene, identify

__all__ = ["plan_creation", "plan_recovery"]

_NO_SCRIPT: Final = "StartupScriptMissing"


def _compute_wait_s(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> float:
    """Compute the seconds until the resource may be asked for; 0: now.

    A changed spec is asked for at once after an error, since it may be the remedy; but not while a request for the
    old one may still be carried out.
    """
    bookkeeping, now = status.bookkeeping, scene.now
    if bookkeeping.spec_hash and was_changed(resource.spec, bookkeeping.spec_hash):
        asked_at = bookkeeping.asked_at
        return 0.0 if asked_at is None else max(0.0, asked_at + scene.settings.settle_s - now)
    return 0.0 if bookkeeping.not_before is None else max(0.0, bookkeeping.not_before - now)


def plan_creation(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan to create the cloud resource, which is absent for certain. The status is written before the request."""
    observed, settings, now = scene.observed, scene.settings, scene.now
    obstacle = _find_rest(status, scene) or _find_refusal(resource, status, scene)
    if obstacle is not None:
        return obstacle
    wait_s = _compute_wait_s(resource, status, scene)
    if wait_s > 0:
        text = f"the next request is sent at {render_time(now + wait_s)}"
        return Plan(status=status, look_s=wait_s, waiting=text)
    if observed.script_error:
        accepted = _refuse(_NO_SCRIPT, observed.script_error)
        return Plan(status=status, look_s=settings.poll_active_s, accepted=accepted)
    request = build_request(
        resource,
        number=status.bookkeeping.number,
        cluster_id=observed.cluster_id,
        script=observed.script,
    )
    status = _claim(resource, status, adopted=False)
    unanswered = status.bookkeeping.asked_at is not None  # the request before it
    status = book(status, asked_at=int(now), asked_again=unanswered, not_before=None)
    action = CreateCloudResource(request=request)
    return Plan(status=status, actions=(action,), look_s=0.0, waiting="asks the cloud for it")


def _find_rest(status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Find what an earlier cloud resource has left; it goes before the next one is asked for."""
    members, rest = scene.observed.members, [*scene.sight.nodes, *scene.sight.leftovers]
    if rest:
        text = f"the cloud still has node {rest[0].id} of an earlier one"
        return Plan(status=status, look_s=scene.settings.poll_fast_s, waiting=text)
    alive = [member.name for member in members if member.ready]
    if alive and status.bookkeeping.number == 0:  # there was no earlier one, as far as anybody knows
        text = (
            f"node {alive[0]} of this cluster names this object and is Ready, but the cloud has no machine of it: take "
            f"the label {QUEUED_RESOURCE_UID_LABEL} from it, or delete the Node"
        )
        return Plan(status=status, look_s=scene.settings.poll_fast_s, waiting=text)
    if members:
        actions, look_s = delete_nodes(scene)
        text, problems = f"removes node {members[0].name} of an earlier one", find_refusals(scene.observed)
        return Plan(status=status, actions=actions, look_s=look_s, waiting=text, problems=problems)
    return None


def _find_refusal(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Find what makes the request pointless, however long one waits."""
    queueing = resource.spec.queueing
    valid_until = None if queueing is None else queueing.end_time
    if queueing is None or valid_until is None or valid_until > scene.now:
        return None
    name = "validUntilTime" if queueing.valid_interval is None else "validInterval.endTime"
    text = f"queueing.{name}, {render_time(valid_until)}, has passed: set a later one, or leave it out"
    return Plan(status=status, accepted=_refuse("Expired", text))


def plan_recovery(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan to take up a resource of ours that the status doesn't tell of: just adopted, or somebody has emptied it."""
    meta, found = resource.metadata, scene.sight.resource
    assert found is not None  # the caller has seen it
    number = parse_number(meta.namespace, meta.name, found.id)
    assert number is not None  # the caller has looked
    adopted = found.node.get("labels", {}).get(UID_LABEL) != meta.uid
    text = f"{found.name} is this object's now, with its machines and costs, as annotation {ADOPT_ANNOTATION} says"
    events = (
        (ObjectEvent(warning=False, reason="Adopted", message=text),) if status.bookkeeping.adopting else ()
    )
    identity = identify(found)
    released = tuple(each for each in status.bookkeeping.released if each != identity)
    status = book(status, number=number, adopting="", identity=identity, released=released)
    status = _claim(resource, status, adopted=adopted)
    return Plan(status=status, look_s=0.0, waiting=f"takes {found.id} up", events=events)


def _claim(resource: QueuedResource, status: QueuedResourceStatus, *, adopted: bool) -> QueuedResourceStatus:
    """Return the status with the cloud resource's name in it: from then on, it may exist and be the object's."""
    meta, spec = resource.metadata, resource.spec
    cloud_id = make_cloud_id(meta.namespace, meta.name, status.bookkeeping.number)
    status = status.model_copy(
        update={
            "cloud_name": make_cloud_name(place_of(spec), cloud_id),
            "api_version": choose_api_version(spec).value,
        }
    )
    if status.state in {None, QueuedResourceState.GONE}:
        status = status.model_copy(update={"state": QueuedResourceState.PENDING})
    return book(status, created=True, adopted=adopted, spec_hash=hash_spec(spec))


def _refuse(reason: str, message: str) -> ConditionUpdate:
    kind = QueuedResourceConditionType.ACCEPTED
    return ConditionUpdate(type=kind, status=False, reason=reason, message=message)
