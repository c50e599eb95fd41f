"""Take over cloud resources that don't carry this object's label, where its annotation names them; let them go. Pure.

A resource is the object's whose uid its label is, whoever made it. The API writes labels without a condition: of two
objects whose annotations name one resource, the one that writes last has it. The other one reads that label back, lets
go, and doesn't write again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudNode,
    CloudQueuedResource,
    CloudRequest,
    ErrorKind,
)
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.labels import ADOPT_ANNOTATION
from stepkeeper_operator.queued_resources.decide.answers import book, error_kind
from stepkeeper_operator.queued_resources.decide.mirror import match_members
from stepkeeper_operator.queued_resources.decide.problems import name_some
from stepkeeper_operator.queued_resources.decision import Action, LabelNodes, Plan, Relabel, Uncordon
from stepkeeper_operator.queued_resources.naming import (
    CLUSTER_LABEL,
    NAME_LABEL,
    NAMESPACE_LABEL,
    UID_LABEL,
    make_cloud_id,
    make_labels,
    parse_number,
)
from stepkeeper_operator.queued_resources.observed import Verb
from stepkeeper_operator.queued_resources.request import build_request, choose_api_version
from stepkeeper_operator.queued_resources.sight import (
    Presence,
    Scene,
    Sight,
    find_labels,
    identify,
    list_live,
    was_let_go,
)

__all__ = [
    "is_lost",
    "judge_labels",
    "let_go",
    "plan_blocked",
    "plan_labels",
    "plan_release",
    "uncordon_members",
]

_KIND: Final = QueuedResourceConditionType.ACCEPTED
_ACTIVE: Final = "ACTIVE"
_READY: Final = "READY"
_MOST_RELEASED: Final = 16
_NOBODY: Final = "nobody"
_REFUSED: Final = {ErrorKind.TERMINAL, ErrorKind.NOT_FOUND, ErrorKind.CREDENTIALS}
_COMPARED: Final = ("accelerator_type", "accelerator_config", "runtime_version")
_DELETE: Final = "gcloud compute tpus queued-resources delete --force"


def plan_blocked(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Plan | None:
    """Plan while nothing of the name is the object's: adopt what its annotation names, or say what blocks a creation.

    None: nothing blocks it. What is nowhere under its id, though it was asked for, isn't blocked.
    """
    bookkeeping = status.bookkeeping
    if scene.sight.presence is Presence.ABSENT and (bookkeeping.number or bookkeeping.created):
        return None
    others, wanted = scene.sight.others, scene.meta.annotations.get(ADOPT_ANNOTATION, "")
    target = _find_target(status, scene, wanted)
    if target is not None:
        return _plan_adoption(resource, status, target, scene)
    status = book(status, adopting="", adopted=False)
    blocks = others and (not bookkeeping.number or was_let_go(others[0], bookkeeping))
    if others and not blocks:  # only the first id is promised to people
        text = f"{others[0].id} isn't this object's: takes the next number"
        status = book(status, number=bookkeeping.number + 1, created=False, asked_at=None)
        return Plan(status=status, look_s=0.0, waiting=text)
    if blocks:
        plan = _refuse(status, scene, "NotOurs", _describe_other(others[0], wanted, scene))
        return replace(plan, look_s=scene.settings.poll_fast_s) if others[0].state == "DELETING" else plan
    if not wanted:
        return None
    text = (
        f"annotation {ADOPT_ANNOTATION} names {wanted}, and the cloud has nothing of this object's name with that id. "
        "Correct it, or remove it and new machines are requested"
    )
    return _refuse(status, scene, "NothingToAdopt", text)


def plan_labels(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> tuple[Action, ...]:
    """Plan the labels that are missing on what was adopted, and those of the cluster's nodes on its machines."""
    former = match_members(scene.sight.nodes, scene.observed.former).values()
    relabels = tuple(Relabel(member=member) for members in former for member in members)
    return (*relabels, *_label(resource, status, scene.sight.unlabelled, scene))


def judge_labels(status: QueuedResourceStatus, nodes: tuple[CloudNode, ...]) -> ConditionUpdate | None:
    """Say that labels are still missing. None: none is, or the cloud has refused them and its own words tell."""
    ready = [node.id for node in nodes if node.state == _READY]
    refused = status.error is not None and status.error.verb == Verb.LABEL
    if not ready or (refused and error_kind(status) in _REFUSED):
        return None
    return _await(f"writes this object's label on node {name_some(ready)}")


def is_lost(status: QueuedResourceStatus, sight: Sight) -> bool:
    """Check whether what was the object's carries another label now."""
    unseen = {None, QueuedResourceState.PENDING, QueuedResourceState.GONE, QueuedResourceState.DELETING}
    had = status.bookkeeping.adopted or status.state not in unseen
    return sight.presence is Presence.FOREIGN and status.bookkeeping.created and had


def plan_release(status: QueuedResourceStatus, scene: Scene) -> Plan:
    """Let go of what carries another label now. It isn't touched again, unless somebody asks for it again."""
    changes: dict[str, Any] = {"removing": "", "removing_since": None, "active_since": None}
    after = book(let_go(status, scene.sight), missing_since=None, **changes)
    pending = {"state": QueuedResourceState.PENDING, "operation": None, "error": None}
    text = f"{status.cloud_name} doesn't carry this object's label any more: it is left alone"
    event = ObjectEvent(warning=True, reason="LetGo", message=text)
    return Plan(
        status=after.model_copy(update=pending), actions=uncordon_members(scene), look_s=0.0, events=(event,)
    )


def let_go(status: QueuedResourceStatus, sight: Sight) -> QueuedResourceStatus:
    """Note that the present one isn't the object's any more, whatever its request's label says."""
    assert sight.resource is not None  # the caller has seen it
    before, identity = status.bookkeeping.released, identify(sight.resource)
    released = (*(each for each in before if each != identity), identity)[-_MOST_RELEASED:]
    return book(status, created=False, adopted=True, adopting="", released=released)


def uncordon_members(scene: Scene) -> tuple[Uncordon, ...]:
    """Take back the cordons of a removal that came to nothing, such as one that a lost status told of."""
    return tuple(Uncordon(member=member) for member in scene.observed.members if member.cordoned_by_us)


def _find_target(status: QueuedResourceStatus, scene: Scene, wanted: str) -> CloudQueuedResource | None:
    """Find what the annotation names: what has the present id, or at first any id of this name."""
    meta, number = scene.meta, status.bookkeeping.number
    present = make_cloud_id(meta.namespace, meta.name, number)
    named = wanted == present or (not number and parse_number(meta.namespace, meta.name, wanted) is not None)
    listing = scene.observed.listing
    return listing.resources.get(wanted) if named and listing is not None else None


def _plan_adoption(
    resource: QueuedResource, status: QueuedResourceStatus, found: CloudQueuedResource, scene: Scene
) -> Plan:
    listing, settings, bookkeeping = scene.observed.listing, scene.settings, status.bookkeeping
    assert listing is not None  # the caller has found it there
    labels = find_labels(found, listing)
    owner = labels.get(UID_LABEL, "") or _NOBODY
    if owner in scene.observed.other_uids:
        text = (
            f"{found.name} belongs to QueuedResource {labels.get(NAMESPACE_LABEL)}/{labels.get(NAME_LABEL)} of this "
            "cluster. Delete that object with deletionPolicy: Retain first"
        )
        return _refuse(book(status, adopting=""), scene, "NotOurs", text)
    if bookkeeping.adopted or bookkeeping.adopting not in {"", owner}:
        text = (
            f"{found.name} was this object's, or about to be, and now carries the label of {owner}. It is left alone: "
            f"to take it over once more, remove annotation {ADOPT_ANNOTATION}, and set it again"
        )
        return _refuse(status, scene, "NotOurs", text)
    live = list_live(found, listing)
    ready = {node.id for node in live if node.state == _READY}
    missing = [name for name in found.node_ids if name not in ready]
    if missing or not live or found.state != _ACTIVE:
        which = f"; {name_some(missing)} isn't" if missing else ""
        text = (
            f"{found.name}, which is {found.state}, is adopted once it is {_ACTIVE} and all its nodes are READY, since "
            f"they carry the label{which}. If that doesn't change, delete it ({_DELETE})"
        )
        return Plan(status=status, look_s=settings.poll_active_s, accepted=_await(text))
    differences = tuple(_find_differences(_ask(resource, found, scene), found, listing))
    if differences:
        text = (
            f"{found.name} isn't what the spec asks for: {'; '.join(differences)}. Change the spec to match it, or \
delete it ({_DELETE})"
        )
        return _refuse(status, scene, "Differs", text)
    status = book(status, adopting=owner, identity=identify(found))
    actions = _label(resource, status, live, scene)
    return Plan(
        status=status, actions=actions, look_s=settings.poll_fast_s, accepted=judge_labels(status, live)
    )


def _label(
    resource: QueuedResource, status: QueuedResourceStatus, nodes: tuple[CloudNode, ...], scene: Scene
) -> tuple[Action, ...]:
    not_before, uid = status.bookkeeping.not_before, scene.meta.uid
    seen = {node.id: node.labels.get(UID_LABEL, "") for node in nodes if node.state == _READY}
    due = [node_id for node_id, owner in seen.items() if owner != uid]
    if not due or (not_before is not None and scene.now < not_before):
        return ()
    return (
        LabelNodes(
            place=nodes[0].place,
            owners={node_id: seen[node_id] for node_id in due},
            labels=make_labels(scene.meta, scene.observed.cluster_id),
            version=choose_api_version(resource.spec),
        ),
    )


def _ask(resource: QueuedResource, found: CloudQueuedResource, scene: Scene) -> CloudRequest:
    number = parse_number(scene.meta.namespace, scene.meta.name, found.id) or 0
    return build_request(resource, number=number, cluster_id=scene.observed.cluster_id, script=None)


def _find_differences(asked: CloudRequest, found: CloudQueuedResource, listing: Listing) -> Iterator[str]:
    """Describe in which machines it differs from what is asked for. Version v2 doesn't show all tiers."""
    pairs: dict[str, tuple[Any, Any]] = {
        name: (asked.node[name], found.node.get(name)) for name in _COMPARED if name in asked.node
    }
    pairs["nodes"] = (", ".join(asked.node_ids), ", ".join(found.node_ids))
    if listing.version is ApiVersion.V2ALPHA1:
        pairs["tier"] = (next(iter(asked.tier)), next(iter(found.tier), "guaranteed"))
    for name, (wanted, present) in pairs.items():
        if wanted != present:
            yield f"{name}: asked for {_show(wanted)}, the cloud has {_show(present)}"


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(str(each) for each in value.values())
    return str(value)


def _describe_other(found: CloudQueuedResource, wanted: str, scene: Scene) -> str:
    listing = scene.observed.listing
    labels = {} if listing is None else find_labels(found, listing)
    keys = (CLUSTER_LABEL, NAMESPACE_LABEL, NAME_LABEL, UID_LABEL)
    named = ", ".join(f"{key}={labels[key]}" for key in keys if key in labels)
    whose = f"carries another object's label: {named}" if named else "carries no label of an object"
    if labels.get(UID_LABEL) == scene.meta.uid:
        whose = "has no nodes that carry a label: another object has taken it over from this one"
    wrong = f" (the annotation names {wanted})" if wanted else ""
    return (
        f"{found.name} exists, is {found.state} and {whose}. It is never touched. To take it over, machines and costs, "
        f"set annotation {ADOPT_ANNOTATION}: {found.id} on this object{wrong}; or delete it ({_DELETE}), or choose "
        "another metadata.name"
    )


def _refuse(status: QueuedResourceStatus, scene: Scene, reason: str, message: str) -> Plan:
    accepted = ConditionUpdate(type=_KIND, status=False, reason=reason, message=message)
    return Plan(status=status, look_s=scene.settings.poll_waiting_s, accepted=accepted)


def _await(message: str) -> ConditionUpdate:
    return ConditionUpdate(type=_KIND, status=None, reason="Adopting", message=message)
