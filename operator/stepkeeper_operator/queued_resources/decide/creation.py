"""Plan what happens while the cloud has nothing of ours under the present id: create, adopt, or say why not. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudQueuedResource, CloudRequest
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.labels import QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.compare import find_differences
from stepkeeper_operator.queued_resources.decide.answers import book
from stepkeeper_operator.queued_resources.decide.claim import plan_claim
from stepkeeper_operator.queued_resources.decide.problems import find_refusals
from stepkeeper_operator.queued_resources.decide.removal import delete_nodes
from stepkeeper_operator.queued_resources.decision import CreateCloudResource, Finding, Plan
from stepkeeper_operator.queued_resources.naming import (
    CLUSTER_LABEL,
    NAME_LABEL,
    NAMESPACE_LABEL,
    UID_LABEL,
    Owner,
    find_owner,
    make_cloud_id,
    make_cloud_name,
    parse_number,
)
from stepkeeper_operator.queued_resources.request import (
    build_request,
    choose_api_version,
    hash_spec,
    place_of,
)
from stepkeeper_operator.queued_resources.sight import Presence, Scene

__all__ = ["compute_wait_s", "plan_adoption", "plan_creation", "plan_recovery"]

_MESSAGE_LIMIT: Final = 2048
_NO_SCRIPT: Final = "StartupScriptMissing"


def compute_wait_s(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> float:
    """Compute the seconds until the resource may be asked for; 0: now.

    A changed spec is asked for at once after an error, since it may be the remedy; but not while a request for the
    old one may still be carried out.
    """
    bookkeeping, now = status.bookkeeping, scene.now
    if bookkeeping.spec_hash not in {"", hash_spec(resource.spec)}:
        asked_at = bookkeeping.asked_at
        return 0.0 if asked_at is None else max(0.0, asked_at + scene.settings.settle_s - now)
    return 0.0 if bookkeeping.not_before is None else max(0.0, bookkeeping.not_before - now)


def plan_creation(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan to create the cloud resource, which is absent for certain. The status is written before the request."""
    observed, settings, now = scene.observed, scene.settings, scene.now
    obstacle = _find_rest(status, scene) or _find_refusal(resource, status, scene)
    if obstacle is not None:
        return obstacle
    wait_s = compute_wait_s(resource, status, scene)
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
    retries = status.bookkeeping.retries
    if status.bookkeeping.asked_at is not None:  # the request before it has no known answer
        retries = max(1, retries)
    status = book(status, asked_at=int(now), not_before=None, retries=retries)
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


def plan_adoption(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan for something that the operator didn't make for this object: adopt it if it matches, else say why not."""
    observed, settings, found = scene.observed, scene.settings, scene.sight.resource
    assert found is not None  # the caller has seen it
    if status.bookkeeping.number > 0:  # only the first id is promised to people
        number = status.bookkeeping.number + 1
        status = book(status, number=number, created=False, asked_at=None)
        return Plan(
            status=status, look_s=0.0, waiting=f"{found.id} is somebody else's: takes the next number"
        )
    if scene.sight.presence is Presence.FOREIGN:
        return Plan(
            status=book(status, claimed_at=None),
            look_s=settings.poll_waiting_s,
            accepted=_refuse("NotOurs", _describe_foreign(found, scene)),
        )
    relic = scene.sight.presence is Presence.RELIC
    number = parse_number(scene.meta.namespace, scene.meta.name, found.id) or 0
    # Machines that joined long ago need no script any more, and its token is another one by now.
    script = None if relic else observed.script
    asked = build_request(resource, number=number, cluster_id=observed.cluster_id, script=script)
    doubt = _find_doubt(asked, scene, relic=relic)
    if doubt is not None:
        return Plan(status=status, look_s=settings.poll_active_s, accepted=doubt)
    differences = find_differences(asked, found)
    if not differences:
        claim = None if relic else plan_claim(resource, status, scene)
        if claim is not None:
            return claim
        status = _claim(resource, book(status, number=number, claimed_at=None), adopted=True)
        return Plan(status=status, look_s=0.0, waiting="adopts what exists")
    status = book(status, claimed_at=None)
    whose = "is of an earlier object of this name" if relic else "has no labels of this operator"
    text = (
        f"{found.name} exists, {whose}, and isn't what the spec asks for: "
        f"{'; '.join(differences)}. Change the spec to match it and it is adopted, delete it (gcloud compute tpus "
        "queued-resources delete --force), or choose another metadata.name"
    )
    return Plan(status=status, look_s=settings.poll_waiting_s, accepted=_refuse("Differs", text))


def plan_recovery(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Plan for a resource of ours that the status doesn't tell of: somebody has emptied the status. It is taken up."""
    meta, found = resource.metadata, scene.sight.resource
    assert found is not None  # the caller has seen it
    number = parse_number(meta.namespace, meta.name, found.id)
    assert number is not None  # the caller has looked
    status = book(status, number=number)
    return Plan(
        status=_claim(resource, status, adopted=False), look_s=0.0, waiting=f"takes {found.id} up again"
    )


def _claim(resource: QueuedResource, status: QueuedResourceStatus, *, adopted: bool) -> QueuedResourceStatus:
    """Return the status with the cloud resource's name in it: from then on, it may exist and be the object's."""
    meta, spec = resource.metadata, resource.spec
    version, why = choose_api_version(spec)
    cloud_id = make_cloud_id(meta.namespace, meta.name, status.bookkeeping.number)
    status = status.model_copy(
        update={
            "cloud_name": make_cloud_name(place_of(spec), cloud_id),
            "api_version": version.value,
            "api_version_reason": why,
        }
    )
    if status.state in {None, QueuedResourceState.GONE}:
        status = status.model_copy(update={"state": QueuedResourceState.PENDING})
    return book(status, created=True, adopted=adopted, spec_hash=hash_spec(spec))


def _find_doubt(asked: CloudRequest, scene: Scene, *, relic: bool) -> Finding | None:
    """Find why nobody can tell whether what exists is what is asked for."""
    listing = scene.observed.listing
    if scene.observed.script_error and not relic:
        return _refuse(_NO_SCRIPT, scene.observed.script_error)
    if listing is None or listing.version is asked.api_version or listing.version is ApiVersion.V2ALPHA1:
        return None
    why = f" ({listing.refusal})" if listing.refusal else ""
    text = (
        f"{asked.id} exists. Whether it is what the spec asks for shows in v2alpha1 of the Cloud TPU API only, which "
        f"doesn't answer{why}"
    )
    kind = QueuedResourceConditionType.ACCEPTED
    return Finding(type=kind, status=None, reason="NotTold", message=text)


def _refuse(reason: str, message: str) -> Finding:
    kind = QueuedResourceConditionType.ACCEPTED
    return Finding(type=kind, status=False, reason=reason, message=message[:_MESSAGE_LIMIT])


def _describe_foreign(found: CloudQueuedResource, scene: Scene) -> str:
    """Name the owner by the request's labels, else by those of a live node."""
    named = [found.node.get("labels", {}), *(node.labels for node in scene.sight.live)]
    owners = [find_owner(labels, scene.meta, cluster_id=scene.observed.cluster_id) for labels in named]
    labels = named[owners.index(Owner.FOREIGN)]
    owner = ", ".join(
        f"{key}={labels[key]}"
        for key in (CLUSTER_LABEL, NAMESPACE_LABEL, NAME_LABEL, UID_LABEL)
        if key in labels
    )
    return (
        f"{found.name} exists, and its labels say that it is another object's: {owner}. It is never touched. If that "
        "object is gone, delete this (gcloud compute tpus queued-resources delete --force); else choose another "
        "metadata.name"
    )
