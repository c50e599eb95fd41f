"""Apply a decision about a QueuedResource to the cloud and the cluster: all writes of a reconcile."""

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from stepkeeper_operator.api.base import ObjectMeta
from stepkeeper_operator.cloud_tpu.cloud import CloudTPU, CloudTPUError, ErrorKind
from stepkeeper_operator.cloud_tpu.naming import FINALIZER, UID_LABEL, make_node_labels
from stepkeeper_operator.cluster.resources import NODES
from stepkeeper_operator.errors import ApiError, InvalidObjectError
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.kinds.writing import ObjectWriter
from stepkeeper_operator.labels import CORDONED_BY_ANNOTATION
from stepkeeper_operator.queued_resources.absence import read_by_name
from stepkeeper_operator.queued_resources.cloud_view import is_ours
from stepkeeper_operator.queued_resources.decision import (
    Action,
    Cordon,
    CreateCloudResource,
    Decision,
    DeleteCloudResource,
    DeleteNode,
    EvictPod,
    LabelNodes,
    Relabel,
    SetFinalizer,
)
from stepkeeper_operator.queued_resources.observed import CORDON_RETRY_S, Memory, Observed, Outcome, Verb
from stepkeeper_operator.queued_resources.subject import Subject

__all__ = ["Applier"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applier:
    """Carry out a decision in this order: status, events, actions.

    The cloud's answer is remembered, and the next decision adds it to the status.
    """

    shared: Shared
    cloud: CloudTPU
    memory: Memory
    writer: ObjectWriter

    async def apply_decision(self, subject: Subject, observed: Observed, decision: Decision) -> None:
        """Carry out `decision`. Raises ApiError or LeaseLostError; the writes before it are done."""
        meta, memory = subject.meta, self.memory.get(subject.meta.uid)
        if decision.write_status:
            await self._write_status(subject, decision)
        if memory.outcome is observed.outcome:
            memory.outcome = None  # it is in the status now
        for event in decision.events:
            await self.writer.create_event(meta, event)
        for action in decision.actions:
            await self._do_action(meta, action)
            self.writer.count_write(type(action).__name__, meta)

    async def report_unreadable(self, raw: RawObject, problems: Sequence[str]) -> None:
        """Report the unreadable parts in condition Accepted. Raises ApiError."""
        changed = await self.writer.report_unreadable(raw, problems, initial={"state": "Pending"})
        if changed is not None:
            self.shared.cache.record_queued_resource(changed)

    async def _write_status(self, subject: Subject, decision: Decision) -> None:
        memory = self.memory.get(subject.meta.uid)
        try:
            raw = await self.writer.write_status(subject.meta, decision.status)
        except InvalidObjectError as error:
            if subject.resource is not None:
                raise
            # The API server rejects each status of an object with an invalid spec. The removal continues without it.
            _log.warning("cannot write status of unreadable object", extra={"error": str(error)})
            memory.unwritten = decision.status
        else:
            memory.unwritten = None
            self.shared.cache.record_queued_resource(raw)

    async def _do_action(self, meta: ObjectMeta, action: Action) -> None:
        match action:
            case SetFinalizer():
                await self._set_finalizer(meta, present=action.present)
            case CreateCloudResource():
                creation = self.cloud.create_queued_resource(action.request)
                await self._ask_cloud(meta, Verb.CREATE, creation)
            case DeleteCloudResource():
                await self._ask_cloud(meta, Verb.DELETE, self._delete(meta, action))
            case LabelNodes():
                await self._ask_cloud(meta, Verb.LABEL, self._label(action))
            case Cordon(undo=True):
                await self._cordon(action.member, by=None)
            case Cordon():
                await self._cordon_for_removal(meta, action.member)
            case Relabel():
                await self._change(action.member, labels=make_node_labels(meta))
            case EvictPod(pod=pod):
                # A refusal doesn't stop the other evictions. The eviction is retried until the drain's time is over.
                eviction = self.shared.cluster.evict_pod(pod.namespace, pod.name, uid=pod.uid)
                await _try(eviction, "evict pod", f"{pod.namespace}/{pod.name}")
            case DeleteNode():
                await self._delete_node(meta, action.member)
            case _:
                assert_never(action)

    async def _ask_cloud(self, meta: ObjectMeta, verb: Verb, request: Awaitable[str | None]) -> None:
        memory, at = self.memory.get(meta.uid), self.shared.clock()
        memory.last_cloud_write_at = at
        try:
            memory.outcome = Outcome(verb=verb, at=at, operation=await request or "")
        except CloudTPUError as error:
            memory.outcome = Outcome(verb=verb, at=at, error=error)
        finally:
            memory.last_cloud_write_at = self.shared.clock()
            memory.operation_read_at = 0.0  # read a new operation at once

    async def _delete(self, meta: ObjectMeta, action: DeleteCloudResource) -> str | None:
        """Delete it after another check: another object may have taken it over since the list."""
        place, cloud_id, version = action.place, action.cloud_id, action.version
        listing = await read_by_name(self.cloud, place, cloud_id, version)
        found = listing.resources.get(cloud_id)
        if found is None:
            return None
        if not is_ours(found, listing, meta, action.operator):
            text = f"{cloud_id} no longer has this object's label, so it isn't deleted"
            raise CloudTPUError(ErrorKind.BUSY, "ABORTED", text)
        return await self.cloud.delete_queued_resource(
            place, cloud_id, request_id=action.request_id, version=version
        )

    async def _label(self, action: LabelNodes) -> None:
        """Label the nodes, each after another check: another operator may have labeled it since the list."""
        for node_id, owner in action.owners.items():
            node = await self.cloud.get_node(action.place, node_id, action.version)
            if node is None or node.labels.get(UID_LABEL, "") != owner:
                return
            labels = {**node.labels, **action.labels}
            await self.cloud.set_node_labels(action.place, node_id, labels, action.version)

    async def _set_finalizer(self, meta: ObjectMeta, *, present: bool) -> None:
        others = [name for name in meta.finalizers if name != FINALIZER]
        raw = await self.writer.set_finalizers(meta, [*others, FINALIZER] if present else others)
        if raw is not None and present:  # without the finalizer, the watch reports the deletion
            self.shared.cache.record_queued_resource(raw)

    async def _cordon_for_removal(self, meta: ObjectMeta, member: Node) -> None:
        """Cordon a node. A refusal doesn't block the removal, since machines cost money. Retry after a minute."""
        memory, now = self.memory.get(meta.uid), self.shared.clock()
        is_logged = memory.cordon_refused_at is not None and now < memory.cordon_refused_at + CORDON_RETRY_S
        level = logging.DEBUG if is_logged else logging.INFO  # one message for hundreds of nodes is enough
        if not await _try(self._cordon(member, by=meta.uid), "cordon node", member.name, level=level):
            memory.cordon_refused_at = now

    async def _cordon(self, member: Node, *, by: str | None) -> None:
        """Cordon a node for the object with uid `by`; None: uncordon it."""
        await self._change(member, unschedulable=by is not None, annotations={CORDONED_BY_ANNOTATION: by})

    async def _change(self, member: Node, **changes: Any) -> None:
        raw = await self.shared.cluster.change_node(member.name, uid=member.uid, **changes)
        if raw is not None:
            self.shared.cache.record_node(raw)

    async def _delete_node(self, meta: ObjectMeta, member: Node) -> None:
        """Delete a Node object. A permanent error is shown in the next status, and doesn't stop the other deletions."""
        refusals = self.memory.get(meta.uid).refusals
        try:
            await self.shared.cluster.delete(NODES, None, member.name, uid=member.uid)
        except ApiError as error:
            if not error.is_permanent:
                raise
            refusals[member.uid] = str(error)
        else:
            refusals.pop(member.uid, None)


async def _try(request: Awaitable[None], what: str, name: str, *, level: int = logging.INFO) -> bool:
    """Send a request that a later reconcile repeats if it fails. Return whether it succeeded."""
    try:
        await request
    except ApiError as error:
        _log.log(level, "cannot %s", what, extra={"object": name, "error": str(error)})
        return False
    return True
