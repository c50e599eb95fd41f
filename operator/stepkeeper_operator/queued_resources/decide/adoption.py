"""Adopt cloud resources without this object's label if its annotation names them. Pure.

A resource belongs to the object whose uid is in its label, regardless of who created it. The API can't set labels
conditionally: if the annotations of two objects name one resource, the last write wins. The other object reads that
label, and doesn't write again.
"""

from collections.abc import Iterator
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_slices import SlicesSpec
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
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
from stepkeeper_operator.queued_resources.cloud_view import View, find_labels, identify, list_live
from stepkeeper_operator.queued_resources.decide.answers import PERMANENT, error_kind, update_status
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

__all__ = ["judge_labels", "plan_blocked", "plan_labels", "uncordon_members"]

_UNOWNED: Final = "none"  # in `adopting`, for a resource without a label
_DELETE: Final = "gcloud compute tpus queued-resources delete --force"


def plan_blocked(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> Plan | None:
    """Plan while the object owns no cloud resource: adopt the one in its annotation, or report what blocks a creation.

    None: nothing blocks it. A resource under the current id does, or one labeled for an earlier object of this name.
    """
    operator, listing = status.operator, view.observed.listing
    # If the current id is free, only the object's first request can be blocked.
    if listing is None or (view.cloud.absent and (operator.number or operator.created)):
        return None
    others, adopt_id = view.cloud.others, view.meta.annotations.get(ADOPT_ANNOTATION, "")
    had_resource = operator.created and (operator.adopted or status.was_seen)
    if view.cloud.foreign is not None and had_resource:
        status = _record_loss(status, view.cloud.foreign, view)
    target = listing.resources.get(adopt_id) if _may_adopt(status, view, adopt_id) else None
    if target is not None:
        return _plan_adoption(resource, status, target, listing, view)
    status = update_status(status, adopting="")  # the annotation names nothing that can be adopted
    lost = bool(others) and operator.created and identify(others[0]) == status.operator.identity
    # Only the first id is documented, and waits until a user frees it. A later id is skipped.
    if others and operator.number and not lost:
        text = f"{others[0].id} belongs to another object: the request uses the next number"
        status = update_status(status, number=operator.number + 1, created=False, asked_at=None)
        return Plan(status=status, requeue_after_s=0.0, waiting=text)
    if others:
        text = _describe_other(others[0], listing, adopt_id, uid=view.meta.uid)
        return _refuse(status, judge_accepted(Reason.OWNED_BY_OTHER, text), view)
    if not adopt_id:
        return None
    text = (
        f"annotation {ADOPT_ANNOTATION} names {adopt_id}, but the cloud has no resource of this object's name with "
        "that id. Correct the annotation, or remove it to request new machines"
    )
    return _refuse(status, judge_accepted(Reason.NOTHING_TO_ADOPT, text), view)


def plan_labels(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> tuple[Action, ...]:
    """Plan the missing labels of adopted slices, and of the cluster's nodes on their machines."""
    previous = match_members(view.cloud.nodes, view.observed.previous).values()
    relabels = tuple(Relabel(member=member) for members in previous for member in members)
    return (*relabels, *_label(resource, status, view.cloud.unlabeled, view))


def judge_labels(status: QueuedResourceStatus, nodes: tuple[CloudNode, ...]) -> ConditionUpdate | None:
    """Make condition Accepted for missing labels. None: none is missing, or the cloud's refusal is shown instead."""
    ready = [node.id for node in nodes if node.is_ready]
    refused = status.error is not None and status.error.verb == Verb.LABEL
    if not ready or (refused and error_kind(status) in PERMANENT):
        return None
    text = f"the operator sets this object's label on slice {name_some(ready)}"
    return judge_accepted(Reason.ADOPTING, text, status=None)


def uncordon_members(view: View) -> tuple[Cordon, ...]:
    """Undo the cordons of an abandoned removal: its status was lost, or another object owns the resource now."""
    ours = (n for n in view.observed.members if n.unschedulable and n.cordoned_by == view.meta.uid)
    return tuple(Cordon(member=member, undo=True) for member in ours)


def _record_loss(status: QueuedResourceStatus, lost: CloudQueuedResource, view: View) -> QueuedResourceStatus:
    """Return the status of an object whose resource has another object's label now.

    The object's own uid in `adopting` keeps it from taking the resource back while the annotation stays. Without nodes,
    the lost resource shows this object's label in its request again: `identity` then shows that it is lost.
    """
    gone: dict[str, Any] = dict.fromkeys(("operation", "error", "removal", "active_since"))
    state, uid = QueuedResourceState.PENDING, view.meta.uid
    return update_status(status, state=state, adopting=uid, adopted=False, identity=identify(lost), **gone)


def _may_adopt(status: QueuedResourceStatus, view: View, adopt_id: str) -> bool:
    """Return True for the current id, and, before the first recreation, for any id of the object's name."""
    namespace, name, number = view.meta.namespace, view.meta.name, status.operator.number
    of_name = parse_number(namespace, name, adopt_id) is not None
    return adopt_id == make_cloud_id(namespace, name, number) or (not number and of_name)


def _plan_adoption(
    resource: QueuedResource,
    status: QueuedResourceStatus,
    found: CloudQueuedResource,
    listing: Listing,
    view: View,
) -> Plan:
    labels = find_labels(found, listing)
    owner = labels.get(UID_LABEL, "") or _UNOWNED
    named = (labels.get(NAMESPACE_LABEL), labels.get(NAME_LABEL))
    here = labels.get(CLUSTER_LABEL) == view.observed.cluster_id
    if here and named != (view.meta.namespace, view.meta.name):
        whose = f"QueuedResource {'/'.join(map(str, named))}" if all(named) else "an unknown QueuedResource"
        text = (
            f"{found.name} has the label of {whose} of this cluster, and only an object of that name can take it over. "
            f"Choose another metadata.name, or delete the cloud resource ({_DELETE})"
        )
        return _refuse(status, judge_accepted(Reason.OWNED_BY_OTHER, text), view)
    if status.operator.adopting not in {"", owner}:
        text = (
            f"{found.name} was adopted by this object, or about to be, and now has the label of {owner}. It is left "
            f"unchanged: to take it over again, remove annotation {ADOPT_ANNOTATION}, and set it again"
        )
        return _refuse(status, judge_accepted(Reason.OWNED_BY_OTHER, text), view)
    obstacle = _find_obstacle(resource, found, listing, view)
    if obstacle is not None:
        return _refuse(status, obstacle, view)
    status, live = update_status(status, adopting=owner, identity=identify(found)), list_live(found, listing)
    actions, accepted = _label(resource, status, live, view), judge_labels(status, live)
    return Plan(status=status, actions=actions, requeue_after_s=view.settings.poll_fast_s, accepted=accepted)


def _find_obstacle(
    resource: QueuedResource, found: CloudQueuedResource, listing: Listing, view: View
) -> ConditionUpdate | None:
    """Find why it can't be adopted, or not yet."""
    ready = {node.id for node in list_live(found, listing) if node.is_ready}
    missing = [name for name in found.node_ids if name not in ready]
    if missing or not ready or found.phase is not QueuedResourceState.ACTIVE:
        which = f"; {name_some(missing)} isn't" if missing else ""
        text = (
            f"{found.name} is {found.state}. It is adopted once it is ACTIVE and all its slices are READY, because "
            f"they carry the label{which}. If that doesn't change, delete it ({_DELETE})"
        )
        return judge_accepted(Reason.ADOPTING, text, status=None)
    number = parse_number(view.meta.namespace, view.meta.name, found.id) or 0
    request = build_request(resource, number=number, cluster_id=view.observed.cluster_id, script=None)
    differences = "; ".join(_find_differences(resource.spec.slices, request, found, listing))
    if not differences:
        return None
    text = f"{found.name} differs from the spec: {differences}. Change the spec to match it"
    return judge_accepted(Reason.SPEC_MISMATCH, f"{text}, or delete it ({_DELETE})")


def _label(
    resource: QueuedResource, status: QueuedResourceStatus, nodes: tuple[CloudNode, ...], view: View
) -> tuple[Action, ...]:
    next_at, uid = status.next_try_time, view.meta.uid
    owners = {node.id: node.labels.get(UID_LABEL, "") for node in nodes if node.is_ready}
    due = {node_id: owner for node_id, owner in owners.items() if owner != uid}
    if not due or (next_at is not None and view.now < next_at):
        return ()
    labels, version = make_labels(view.meta, view.observed.cluster_id), choose_api_version(resource.spec)
    return (LabelNodes(place=nodes[0].place, owners=due, labels=labels, version=version),)


def _find_differences(
    slices: SlicesSpec, request: CloudRequest, found: CloudQueuedResource, listing: Listing
) -> Iterator[str]:
    """Describe the differences between the existing and the requested machines."""
    pairs: dict[str, tuple[Any, Any]] = {
        "accelerator": name_accelerators(slices, found.node),
        "image": (slices.image, found.node.get("runtime_version")),
        "slices": (", ".join(request.node_ids), ", ".join(found.node_ids)),
    }
    if listing.version is ApiVersion.V2ALPHA1:  # v2 doesn't show all tiers
        pairs["tier"] = (next(iter(request.tier)), next(iter(found.tier), "guaranteed"))
    for name, (wanted, present) in pairs.items():
        if wanted != present:
            yield f"{name}: the spec has {wanted}, the cloud has {present}"


def _describe_other(found: CloudQueuedResource, listing: Listing, adopt_id: str, *, uid: str) -> str:
    labels = find_labels(found, listing)
    named = ", ".join(f"{key}={value}" for key, value in labels.items() if key.startswith("stepkeeper-"))
    whose = f"has another object's label: {named}" if named else "has no label of an object"
    if labels.get(UID_LABEL) == uid:  # the request's label: its nodes, which had another one, are gone
        whose = "was taken over by another object"
    wrong = f" (the annotation names {adopt_id})" if adopt_id else ""
    return (
        f"{found.name} exists, is {found.state} and {whose}. The operator doesn't change it. To take it over, with its "
        f"machines and costs, set annotation {ADOPT_ANNOTATION}: {found.id} on this object{wrong}. Otherwise delete it "
        f"({_DELETE}), or choose another metadata.name"
    )


def _refuse(status: QueuedResourceStatus, accepted: ConditionUpdate, view: View) -> Plan:
    settings = view.settings
    again_s = settings.poll_active_s if accepted.status is None else settings.poll_waiting_s
    if any(each.phase is QueuedResourceState.DELETING for each in view.cloud.others):
        again_s = settings.poll_fast_s  # its name will be free soon
    return Plan(status=status, actions=uncordon_members(view), requeue_after_s=again_s, accepted=accepted)
