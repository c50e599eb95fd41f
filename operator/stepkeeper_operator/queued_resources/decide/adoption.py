"""Take over cloud resources that don't carry this object's label, where its annotation names them. Pure.

A resource belongs to the object whose uid its label is, regardless of who made it. The API writes labels without a
condition: of two objects whose annotations name one resource, the one that writes last has it. The other one reads that
label back, and doesn't write again.
"""

from collections.abc import Iterator
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_slices import SlicesSpec
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudNode, CloudQueuedResource, CloudRequest
from stepkeeper_operator.cloud_tpu.naming import (
    CLUSTER_LABEL,
    NAME_LABEL,
    NAMESPACE_LABEL,
    UID_LABEL,
    make_cloud_id,
    make_labels,
    parse_number,
)
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.cloud_tpu.request import build_request, choose_api_version, name_accelerators
from stepkeeper_operator.labels import ADOPT_ANNOTATION
from stepkeeper_operator.queued_resources.decide.answers import LASTING, book, error_kind
from stepkeeper_operator.queued_resources.decide.mirror import match_members
from stepkeeper_operator.queued_resources.decide.problems import name_some
from stepkeeper_operator.queued_resources.decision import (
    Action,
    Cordon,
    LabelNodes,
    Plan,
    Relabel,
    judge_accepted,
)
from stepkeeper_operator.queued_resources.observed import Verb
from stepkeeper_operator.queued_resources.sight import Scene, find_labels, identify, list_live

__all__ = ["judge_labels", "plan_blocked", "plan_labels", "uncordon_members"]

_READY: Final = "READY"
_UNOWNED: Final = "none"
_DELETE: Final = "gcloud compute tpus queued-resources delete --force"


def plan_blocked(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Plan while nothing of the name is the object's: adopt what its annotation names, or name what blocks a creation.

    None: nothing blocks it. What is nowhere under its id, though it was asked for, isn't blocked.
    """
    operator, listing = status.operator, scene.observed.listing
    if listing is None or (scene.sight.absent and (operator.number or operator.created)):
        return None
    others, wanted = scene.sight.others, scene.meta.annotations.get(ADOPT_ANNOTATION, "")
    if scene.sight.foreign is not None and operator.created and (operator.adopted or status.was_seen):
        status = _note_loss(status, scene.sight.foreign, scene)
    target = listing.resources.get(wanted) if _may_adopt(status, scene, wanted) else None
    if target is not None:
        return _plan_adoption(resource, status, target, listing, scene)
    status = book(status, adopting="")
    lost = bool(others) and operator.created and identify(others[0]) == status.operator.identity
    if others and operator.number and not lost:  # only the first id is promised to people
        text = f"{others[0].id} isn't this object's: the request takes the next number"
        status = book(status, number=operator.number + 1, created=False, asked_at=None)
        return Plan(status=status, look_s=0.0, waiting=text)
    if others:
        text = _describe_other(others[0], listing, wanted, uid=scene.meta.uid)
        return _refuse(status, judge_accepted(Reason.OWNED_BY_OTHER, text), scene)
    if not wanted:
        return None
    text = (
        f"annotation {ADOPT_ANNOTATION} names {wanted}, and the cloud has nothing of this object's name with that id. "
        "Correct it, or remove it and new machines are requested"
    )
    return _refuse(status, judge_accepted(Reason.NOTHING_TO_ADOPT, text), scene)


def plan_labels(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> tuple[Action, ...]:
    """Plan the labels that are missing on what was adopted, and those of the cluster's nodes on its machines."""
    former = match_members(scene.sight.nodes, scene.observed.former).values()
    relabels = tuple(Relabel(member=member) for members in former for member in members)
    return (*relabels, *_label(resource, status, scene.sight.unlabelled, scene))


def judge_labels(status: QueuedResourceStatus, nodes: tuple[CloudNode, ...]) -> ConditionUpdate | None:
    """Judge that labels are still missing. None: none is, or the cloud has refused them: its error is shown."""
    ready = [node.id for node in nodes if node.state == _READY]
    refused = status.error is not None and status.error.verb == Verb.LABEL
    if not ready or (refused and error_kind(status) in LASTING):
        return None
    return judge_accepted(
        Reason.ADOPTING, f"the operator writes this object's label on slice {name_some(ready)}", status=None
    )


def uncordon_members(scene: Scene) -> tuple[Cordon, ...]:
    """Take back the cordons of a removal that came to nothing: its status is lost, or another object has it now."""
    ours = (n for n in scene.observed.members if n.unschedulable and n.cordoned_by == scene.meta.uid)
    return tuple(Cordon(member=member, undo=True) for member in ours)


def _note_loss(status: QueuedResourceStatus, lost: CloudQueuedResource, scene: Scene) -> QueuedResourceStatus:
    """Return the status of an object whose resource carries another label now.

    While the annotation stays, its own uid in `adopting` keeps it from taking the resource back. By `identity` it knows
    what it has lost while that has no nodes, and shows the label of its request again.
    """
    gone: dict[str, Any] = dict.fromkeys(("operation", "error", "removal", "active_since"))
    state, own = QueuedResourceState.PENDING, scene.meta.uid
    return book(status, state=state, adopting=own, adopted=False, identity=identify(lost), **gone)


def _may_adopt(status: QueuedResourceStatus, scene: Scene, wanted: str) -> bool:
    """Return True for the present id, and at first for any id of this name."""
    namespace, name, number = scene.meta.namespace, scene.meta.name, status.operator.number
    of_name = parse_number(namespace, name, wanted) is not None
    return wanted == make_cloud_id(namespace, name, number) or (not number and of_name)


def _plan_adoption(
    resource: QueuedResource,
    status: QueuedResourceStatus,
    found: CloudQueuedResource,
    listing: Listing,
    scene: Scene,
) -> Plan:
    labels = find_labels(found, listing)
    owner = labels.get(UID_LABEL, "") or _UNOWNED
    named = (labels.get(NAMESPACE_LABEL), labels.get(NAME_LABEL))
    here = labels.get(CLUSTER_LABEL) == scene.observed.cluster_id
    if here and named != (scene.meta.namespace, scene.meta.name):
        whose = f"QueuedResource {'/'.join(map(str, named))}" if all(named) else "an unknown QueuedResource"
        text = (
            f"{found.name} carries the label of {whose} of this cluster, and only an object of that name can take it "
            f"over. Choose another metadata.name, or delete it ({_DELETE})"
        )
        return _refuse(status, judge_accepted(Reason.OWNED_BY_OTHER, text), scene)
    if status.operator.adopting not in {"", owner}:
        text = (
            f"{found.name} was this object's, or about to be, and now carries the label of {owner}. It is left alone: "
            f"to take it over once more, remove annotation {ADOPT_ANNOTATION}, and set it again"
        )
        return _refuse(status, judge_accepted(Reason.OWNED_BY_OTHER, text), scene)
    obstacle = _find_obstacle(resource, found, listing, scene)
    if obstacle is not None:
        return _refuse(status, obstacle, scene)
    status, live = book(status, adopting=owner, identity=identify(found)), list_live(found, listing)
    actions, accepted = _label(resource, status, live, scene), judge_labels(status, live)
    return Plan(status=status, actions=actions, look_s=scene.settings.poll_fast_s, accepted=accepted)


def _find_obstacle(
    resource: QueuedResource, found: CloudQueuedResource, listing: Listing, scene: Scene
) -> ConditionUpdate | None:
    """Find why it can't be adopted yet, or as it is."""
    ready = {node.id for node in list_live(found, listing) if node.state == _READY}
    missing = [name for name in found.node_ids if name not in ready]
    if missing or not ready or found.state != "ACTIVE":
        which = f"; {name_some(missing)} isn't" if missing else ""
        text = (
            f"{found.name}, which is {found.state}, is adopted once it is ACTIVE and all its slices are READY, since "
            f"they carry the label{which}. If that doesn't change, delete it ({_DELETE})"
        )
        return judge_accepted(Reason.ADOPTING, text, status=None)
    number = parse_number(scene.meta.namespace, scene.meta.name, found.id) or 0
    asked = build_request(resource, number=number, cluster_id=scene.observed.cluster_id, script=None)
    differences = "; ".join(_find_differences(resource.spec.slices, asked, found, listing))
    if not differences:
        return None
    text = f"{found.name} isn't what the spec asks for: {differences}. Change the spec to match it"
    return judge_accepted(Reason.SPEC_MISMATCH, f"{text}, or delete it ({_DELETE})")


def _label(
    resource: QueuedResource, status: QueuedResourceStatus, nodes: tuple[CloudNode, ...], scene: Scene
) -> tuple[Action, ...]:
    next_at, uid = status.next_try_time, scene.meta.uid
    owners = {node.id: node.labels.get(UID_LABEL, "") for node in nodes if node.state == _READY}
    due = {node_id: owner for node_id, owner in owners.items() if owner != uid}
    if not due or (next_at is not None and scene.now < next_at):
        return ()
    labels, version = make_labels(scene.meta, scene.observed.cluster_id), choose_api_version(resource.spec)
    return (LabelNodes(place=nodes[0].place, owners=due, labels=labels, version=version),)


def _find_differences(
    slices: SlicesSpec, asked: CloudRequest, found: CloudQueuedResource, listing: Listing
) -> Iterator[str]:
    """Describe in which machines it differs from what is asked for. Version v2 doesn't show all tiers."""
    pairs: dict[str, tuple[Any, Any]] = {
        "accelerator": name_accelerators(slices, found.node),
        "image": (slices.image, found.node.get("runtime_version")),
        "slices": (", ".join(asked.node_ids), ", ".join(found.node_ids)),
    }
    if listing.version is ApiVersion.V2ALPHA1:
        pairs["tier"] = (next(iter(asked.tier)), next(iter(found.tier), "guaranteed"))
    for name, (wanted, present) in pairs.items():
        if wanted != present:
            yield f"{name}: asked for {wanted}, the cloud has {present}"


def _describe_other(found: CloudQueuedResource, listing: Listing, wanted: str, *, uid: str) -> str:
    labels = find_labels(found, listing)
    named = ", ".join(f"{key}={value}" for key, value in labels.items() if key.startswith("stepkeeper-"))
    whose = f"carries another object's label: {named}" if named else "carries no label of an object"
    if labels.get(UID_LABEL) == uid:  # of its request: its nodes are gone, which carried another one
        whose = "was taken over by another object"
    wrong = f" (the annotation names {wanted})" if wanted else ""
    return (
        f"{found.name} exists, is {found.state} and {whose}. It is never touched. To take it over, machines and costs, "
        f"set annotation {ADOPT_ANNOTATION}: {found.id} on this object{wrong}; or delete it ({_DELETE}), or choose "
        "another metadata.name"
    )


def _refuse(status: QueuedResourceStatus, accepted: ConditionUpdate, scene: Scene) -> Plan:
    settings = scene.settings
    look_s = settings.poll_active_s if accepted.status is None else settings.poll_waiting_s
    if any(each.state == "DELETING" for each in scene.sight.others):
        look_s = settings.poll_fast_s  # its name is free soon
    return Plan(status=status, actions=uncordon_members(scene), look_s=look_s, accepted=accepted)
