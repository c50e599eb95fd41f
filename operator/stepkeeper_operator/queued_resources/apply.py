"""Apply a decision about a QueuedResource to the cloud and the cluster. A reconcile writes nowhere else."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, assert_never

from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cloud_tpu.cloud import CloudTPU, CloudTPUError, ErrorKind
from stepkeeper_operator.cluster import NODES, Cluster
from stepkeeper_operator.errors import ApiError, InvalidObjectError, LeaseLostError
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.labels import CORDONED_BY_ANNOTATION
from stepkeeper_operator.queued_resources.absence import read_by_name
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
    Uncordon,
)
from stepkeeper_operator.queued_resources.memory import Memory
from stepkeeper_operator.queued_resources.naming import FINALIZER, UID_LABEL, make_node_labels
from stepkeeper_operator.queued_resources.observed import Member, Observed, Outcome, Refusal, Verb
from stepkeeper_operator.queued_resources.sight import is_ours
from stepkeeper_operator.queued_resources.subject import Subject
from stepkeeper_operator.writing import ObjectWriter

__all__ = ["Applier"]

_log = logging.getLogger(__name__)


class Applier:
    """Carry out a decision in its order: status, events, actions.

    What the cloud answers is remembered, and the next decision takes it into the status.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        cloud: CloudTPU,
        memory: Memory,
        writer: ObjectWriter,
        acting: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._cloud = cloud
        self._memory = memory
        self._writer = writer
        self._acting = acting
        self._clock = clock

    async def apply_decision(self, subject: Subject, observed: Observed, decision: Decision) -> None:
        """Carry out `decision`.

        Raises:
            ApiError: A write to the cluster failed. The writes before it are done.
            LeaseLostError: Another operator may act by now. The writes before that are done.
        """
        meta, memory = subject.meta, self._memory.get(subject.meta.uid)
        if decision.write_status:
            await self._write_status(subject, decision)
        if memory.outcome is observed.outcome:
            memory.outcome = None  # the status tells of it now
        for event in decision.events:
            await self._writer.create_event(meta, event)
        for action in decision.actions:
            await self._do_action(meta, action)
            self._writer.count_write(type(action).__name__, meta)

    async def tell_unreadable(self, raw: RawObject, problems: Sequence[str]) -> None:
        """Say which parts of the spec can't be read. What the cloud has stays as it is.

        Raises:
            ApiError: The write failed, but not because of the spec.
        """
        try:
            told = await self._writer.tell_unreadable(raw, problems, initial={"state": "Pending"})
        except InvalidObjectError as error:
            _log.warning("cannot write status of unreadable object", extra={"error": str(error)})
            return
        if told is not None:
            self._record(told)

    async def _write_status(self, subject: Subject, decision: Decision) -> None:
        memory = self._memory.get(subject.meta.uid)
        try:
            raw = await self._writer.write_status(subject.meta, decision.status.to_raw())
        except InvalidObjectError as error:
            if subject.resource is not None:
                raise
            # Its spec isn't valid, and the API server keeps no status with it. Its removal goes on all the same.
            _log.warning("cannot write status of unreadable object", extra={"error": str(error)})
            memory.unwritten = decision.status
        else:
            memory.unwritten = None
            self._record(raw)

    def _check_acting(self) -> None:
        """Look at the Lease before a write to the cloud, as the cluster does before its writes."""
        if not self._acting():
            raise LeaseLostError(
                "the lease is over: another operator may act, and nothing more is asked of the cloud"
            )

    async def _do_action(self, meta: ObjectMeta, action: Action) -> None:
        self._check_acting()
        match action:
            case SetFinalizer():
                await self._set_finalizer(meta, present=action.present)
            case CreateCloudResource():
                creation = self._cloud.create_queued_resource(action.request)
                await self._ask_cloud(meta, Verb.CREATE, creation)
            case DeleteCloudResource():
                await self._ask_cloud(meta, Verb.DELETE, self._delete(meta, action))
            case LabelNodes():
                await self._ask_cloud(meta, Verb.LABEL, self._label(action))
            case Cordon():
                await self._try_to_cordon(meta, action.member)
            case Uncordon():
                await self._cordon(action.member, by=None)
            case Relabel():
                await self._change(action.member, labels=make_node_labels(meta))
            case EvictPod():
                await self._evict(action)
            case DeleteNode():
                await self._try_to_delete_node(meta, action.member)
            case _:
                assert_never(action)

    async def _ask_cloud(self, meta: ObjectMeta, verb: Verb, request: Awaitable[str | None]) -> None:
        memory, at = self._memory.get(meta.uid), self._clock()
        memory.last_cloud_write_at = at
        try:
            operation = await request
        except CloudTPUError as error:
            memory.outcome = Outcome(verb=verb, at=at, error=error)
        else:
            memory.outcome = Outcome(verb=verb, at=at, operation=operation or "")
        finally:
            memory.last_cloud_write_at = self._clock()
            memory.operation_read_at = 0.0

    async def _delete(self, meta: ObjectMeta, action: DeleteCloudResource) -> str | None:
        """Delete it, after another look: since the list, somebody else may have taken it over."""
        place, cloud_id, version = action.place, action.cloud_id, action.version
        listing = await read_by_name(self._cloud, place, cloud_id, version, at=self._clock())
        found = listing.resources.get(cloud_id)
        if found is None:
            return None
        if not is_ours(found, listing, meta, action.bookkeeping):
            text = f"{cloud_id} doesn't carry this object's label any more, so it isn't deleted"
            raise CloudTPUError(ErrorKind.BUSY, "ABORTED", text)
        self._check_acting()
        return await self._cloud.delete_queued_resource(
            place, cloud_id, request_id=action.request_id, version=version
        )

    async def _label(self, action: LabelNodes) -> None:
        """Label the nodes, each after another look: a list is older, and somebody else may label them, too."""
        for node_id, owner in action.owners.items():
            node = await self._cloud.get_node(action.place, node_id, action.version)
            if node is None or node.labels.get(UID_LABEL, "") != owner:
                return
            self._check_acting()
            labels = {**node.labels, **action.labels}
            await self._cloud.set_node_labels(action.place, node_id, labels, action.version)

    async def _set_finalizer(self, meta: ObjectMeta, *, present: bool) -> None:
        others = [name for name in meta.finalizers if name != FINALIZER]
        raw = await self._writer.set_finalizers(meta, [*others, FINALIZER] if present else others)
        if raw is not None and present:  # without it, the object goes, and the watch tells it
            self._record(raw)

    async def _cordon(self, member: Member, *, by: str | None) -> None:
        """Cordon a node in the name of the object with uid `by`; None: uncordon it."""
        await self._change(member, unschedulable=by is not None, annotations={CORDONED_BY_ANNOTATION: by})

    async def _try_to_cordon(self, meta: ObjectMeta, member: Member) -> None:
        """Cordon a node. A refusal holds up no removal, as machines cost money; it is asked again a minute later."""
        try:
            await self._cordon(member, by=meta.uid)
        except ApiError as error:
            self._memory.get(meta.uid).cordon_refused_at = self._clock()
            _log.warning("cannot cordon node", extra={"node": member.name, "error": str(error)})

    async def _try_to_delete_node(self, meta: ObjectMeta, member: Member) -> None:
        """Delete a Node object. A refusal is told with the next status; the other nodes don't wait for it."""
        refused = self._memory.get(meta.uid).refused_deletions
        try:
            await self._cluster.delete(NODES, None, member.name, uid=member.uid)
        except ApiError as error:
            if not error.lasts:
                raise
            # The decision waits ever longer before it asks for the same again.
            count = refused[member.uid].count + 1 if member.uid in refused else 1
            refused[member.uid] = Refusal(text=str(error), at=self._clock(), count=count)
            _log.warning("cannot delete node", extra={"node": member.name, "error": str(error)})
        else:
            refused.pop(member.uid, None)

    async def _change(self, member: Member, **changes: Any) -> None:
        raw = await self._cluster.change_node(member.name, uid=member.uid, **changes)
        if raw is not None:
            self._cache.record_node(raw)

    async def _evict(self, action: EvictPod) -> None:
        pod = action.pod
        try:
            await self._cluster.evict_pod(pod.namespace, pod.name, uid=pod.uid)
        except ApiError as error:
            # A disruption budget forbids it, two budgets cover the pod, or a webhook says no: the other pods are told
            # to save all the same. The time for the drain is bounded, and this one is asked for again.
            _log.info(
                "cannot evict pod yet", extra={"pod": f"{pod.namespace}/{pod.name}", "error": str(error)}
            )

    def _record(self, raw: RawObject) -> None:
        self._cache.record_queued_resource(raw)
