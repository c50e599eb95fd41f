"""Reconcile one QueuedResource: parse, observe, decide, apply."""

from dataclasses import replace

from typing_extensions import override

from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cloud_tpu.cloud import CloudTPU
from stepkeeper_operator.cloud_tpu.connection import count_requests
from stepkeeper_operator.cluster.protocol import guard_writes
from stepkeeper_operator.cluster.resources import QUEUED_RESOURCES
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.kinds.controller import KindController
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.queued_resources.apply import Applier
from stepkeeper_operator.queued_resources.decide.queued_resource import decide_queued_resource
from stepkeeper_operator.queued_resources.decision import Decision
from stepkeeper_operator.queued_resources.observe import Observer
from stepkeeper_operator.queued_resources.observed import Memory, Observed
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.queued_resources.subject import Subject, read_subject

__all__ = ["QueuedResourceController"]


class QueuedResourceController(KindController[Subject, Observed, Decision]):
    """Reconcile QueuedResources."""

    def __init__(self, shared: Shared, *, cloud: CloudTPU, settings: CloudSettings) -> None:
        super().__init__(QUEUED_RESOURCES, shared)
        self._metrics = shared.metrics.queued_resources
        self._settings = settings
        self._memory = memory = Memory(shared.clock)
        cloud = guard_writes(count_requests(cloud, self._metrics.count_request), acting=shared.acting)
        self._observer = Observer(shared, cloud=cloud, memory=memory, settings=settings)
        self._applier = Applier(shared=shared, cloud=cloud, memory=memory, writer=self._writer)

    @override
    def _read(self, key: ObjectKey, raw: RawObject) -> tuple[Subject | None, tuple[str, ...]]:
        subject = read_subject(raw)
        unwritten = self._memory.get(subject.meta.uid).unwritten
        if subject.resource is None and unwritten is not None:
            subject = replace(subject, status=unwritten)
        return None if subject.problems else subject, subject.problems

    @override
    async def _manage_unreadable(self, key: ObjectKey, raw: RawObject, problems: tuple[str, ...]) -> None:
        await self._applier.report_unreadable(raw, problems)

    @override
    async def _observe(self, key: ObjectKey, subject: Subject, problems: tuple[str, ...]) -> Observed:
        return await self._observer.observe(subject)

    @override
    def _decide(self, subject: Subject, observed: Observed, *, now: float) -> Decision:
        return decide_queued_resource(subject, observed, self._settings, now=now)

    @override
    async def _apply(
        self, key: ObjectKey, subject: Subject, observed: Observed, decision: Decision
    ) -> float | None:
        await self._applier.apply_decision(subject, observed, decision)
        self._record_metrics(key, decision.status)
        return decision.requeue_after_s

    @override
    def _forget_object(self, key: ObjectKey, uid: str) -> None:
        self._observer.forget(uid)
        self._metrics.forget(key.namespace, key.name)

    def _record_metrics(self, key: ObjectKey, status: QueuedResourceStatus) -> None:
        joined, _, total = status.joined.partition("/")
        exhausted = QueuedResourceConditionType.QUOTA_EXHAUSTED
        self._metrics.record(
            key.namespace,
            key.name,
            state=status.state or QueuedResourceState.PENDING,
            hosts=int(total) if total.isdecimal() else None,
            joined_hosts=int(joined or 0),
            recreations=status.recreations,
            quota_exhausted=any(c.type == exhausted and c.status == "True" for c in status.conditions),
        )
