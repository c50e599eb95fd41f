"""Decide for a QueuedResource that is being deleted. It needs no readable spec, and works in every state. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate, merge_conditions
from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.labels import ADOPT_ANNOTATION
from stepkeeper_operator.pacing import find_soonest
from stepkeeper_operator.queued_resources.decide.adoption import is_lost, let_go
from stepkeeper_operator.queued_resources.decide.answers import fold_answers
from stepkeeper_operator.queued_resources.decide.events import derive_events
from stepkeeper_operator.queued_resources.decide.mirror import mirror_cloud
from stepkeeper_operator.queued_resources.decide.problems import (
    degraded,
    find_blocked_deletion,
    find_refusals,
)
from stepkeeper_operator.queued_resources.decide.removal import Removal, begin_removal, plan_removal
from stepkeeper_operator.queued_resources.decision import (
    Action,
    Decision,
    SetFinalizer,
    Uncordon,
)
from stepkeeper_operator.queued_resources.naming import FINALIZER
from stepkeeper_operator.queued_resources.observed import Observed, Verb
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.queued_resources.sight import Scene, look_at
from stepkeeper_operator.queued_resources.subject import has_nothing

__all__ = ["decide_deletion"]

_REASON: Final = "Deleted"


def decide_deletion(
    meta: ObjectMeta,
    before: QueuedResourceStatus,
    observed: Observed,
    settings: CloudSettings,
    *,
    retain: bool,
    now: float,
) -> Decision:
    """Decide the next step of a deletion. The finalizer goes last: until then, the object says what is left."""
    if FINALIZER not in meta.finalizers:
        return Decision(status=before)
    if retain:
        return _let_go(before, observed, *_tell_retained(before))
    sight = look_at(observed, meta, before.bookkeeping)
    has_any = sight.is_ours or sight.strays or sight.leftovers
    if has_nothing(before) and not _must_look(before, observed) and not has_any:
        return Decision(status=before, actions=(SetFinalizer(present=False),))
    scene = Scene(meta=meta, observed=observed, sight=sight, settings=settings, now=now)
    status = begin_removal(fold_answers(before, scene), _REASON, now=now)
    events: tuple[ObjectEvent, ...] = ()
    if is_lost(before, sight):
        status = let_go(status, sight)
        text = f"{before.cloud_name} stays in the cloud: it doesn't carry this object's label any more"
        events = (ObjectEvent(warning=True, reason="LetGo", message=text),)
    removal = plan_removal(status, scene)
    if removal.done:
        return _let_go(before, observed, *events)
    status = _describe(meta, mirror_cloud(status, scene), observed, removal, now=now)
    changed = status != before
    return Decision(
        status=status,
        write_status=changed,
        actions=removal.actions,
        events=(*events, *derive_events(before, status)) if changed else (),
        requeue_after_s=find_soonest(removal.look_s),
    )


def _let_go(before: QueuedResourceStatus, observed: Observed, *events: ObjectEvent) -> Decision:
    """Leave everything as it is in the cloud, and the nodes open for pods again."""
    uncordon = (Uncordon(member=member) for member in observed.members if member.cordoned_by_us)
    actions: tuple[Action, ...] = (*uncordon, SetFinalizer(present=False))
    return Decision(status=before, actions=actions, events=events)


def _must_look(status: QueuedResourceStatus, observed: Observed) -> bool:
    """Return True while only the cloud can tell whether it has anything: somebody may have emptied the status."""
    return status.observed_generation is None and observed.error is not None


def _describe(
    meta: ObjectMeta, status: QueuedResourceStatus, observed: Observed, removal: Removal, *, now: float
) -> QueuedResourceStatus:
    kinds = QueuedResourceConditionType
    text = f"it is being deleted: {removal.waiting}. What is applied now goes, too: apply it again once it is gone"
    findings = [
        ConditionUpdate(type=kinds.ACTIVE, status=False, reason=_REASON, message=text),
        ConditionUpdate(type=kinds.NODES_JOINED, status=False, reason=_REASON, message="it is being deleted"),
        degraded((*find_blocked_deletion(meta, status), *find_refusals(observed))),
    ]
    conditions = merge_conditions(status.conditions, findings, kinds, generation=meta.generation, now=now)
    return status.model_copy(update={"conditions": conditions, "observed_generation": meta.generation})


def _tell_retained(status: QueuedResourceStatus) -> tuple[ObjectEvent, ...]:
    if not status.bookkeeping.created:
        return ()
    operation = status.operation
    going = status.state is QueuedResourceState.DELETING
    if going or (operation is not None and operation.verb == Verb.DELETE):
        text = f"{status.cloud_name} was being deleted before deletionPolicy was Retain, and the cloud goes on with it"
    else:
        cloud_id = status.cloud_name.rpartition("/")[2]
        text = (
            f"{status.cloud_name} and its machines stay in the cloud, and cost money, as deletionPolicy: Retain says. "
            f"A new object takes them up by annotation {ADOPT_ANNOTATION}: {cloud_id}"
        )
    return (ObjectEvent(warning=True, reason="Retained", message=text),)
