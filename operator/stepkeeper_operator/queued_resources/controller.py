"""Reconcile one QueuedResource: parse, observe, decide, apply."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cloud_tpu.cloud import CloudTPU
from stepkeeper_operator.cloud_tpu.connection import count_requests
from stepkeeper_operator.cluster import QUEUED_RESOURCES, Cluster, Resource
from stepkeeper_operator.metrics import Metrics, QueuedResourceMetrics
from stepkeeper_operator.queued_resources.apply import Applier
from stepkeeper_operator.queued_resources.decide.deletion import decide_deletion
from stepkeeper_operator.queued_resources.decide.queued_resource import decide_queued_resource
from stepkeeper_operator.queued_resources.decision import Decision
from stepkeeper_operator.queued_resources.memory import Memory
from stepkeeper_operator.queued_resources.observe import Observer
from stepkeeper_operator.queued_resources.observed import Observed
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.queued_resources.subject import Subject, read_subject
from stepkeeper_operator.reconcile import RETRY_SOON_S
from stepkeeper_operator.writing import ObjectWriter

__all__ = ["QueuedResourceController", "make_queued_resource_controller"]

_log = logging.getLogger(__name__)


class QueuedResourceController:
    """Implement `Controller` for QueuedResources."""

    def __init__(
        self,
        *,
        cache: Cache,
        memory: Memory,
        observer: Observer,
        applier: Applier,
        settings: CloudSettings,
        metrics: QueuedResourceMetrics,
        acting: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._metrics = metrics
        self._memory = memory
        self._observer = observer
        self._applier = applier
        self._settings = settings
        self._acting = acting
        self._clock = clock
        self._uids: dict[ObjectKey, str] = {}

    @property
    def resource(self) -> Resource:
        return QUEUED_RESOURCES

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Bring it to its wanted state, or return in how many seconds to look again. Raises to be tried again."""
        raw = self._cache.get_queued_resource(key)
        if raw is None:
            self.forget(key)
            return None
        subject = read_subject(raw)
        uid = subject.meta.uid
        if self._uids.setdefault(key, uid) != uid:  # another object has taken the name
            self.forget(key)
            self._uids[key] = uid
        unwritten = self._memory.get(uid).unwritten
        if subject.resource is None and unwritten is not None:
            subject = replace(subject, status=unwritten)
        if subject.unfindable or (subject.resource is None and subject.meta.deletion_timestamp is None):
            extra = {**key.log_fields, "error": "; ".join(subject.problems)}
            _log.error("cannot read QueuedResource; is its CRD newer?", extra=extra)
            if self._acting():
                await self._applier.tell_unreadable(raw, subject.problems)
            return None
        observed = await self._observer.observe(subject)
        decision = self._decide(subject, observed)
        # Requests take time: between two of them another operator may have taken over.
        if not self._acting():
            return RETRY_SOON_S
        await self._applier.apply_decision(subject, observed, decision)
        self._record_metrics(key, decision.status)
        return decision.requeue_after_s

    def forget(self, key: ObjectKey) -> None:
        """Drop what is remembered of a resource that is gone."""
        uid = self._uids.pop(key, None)
        if uid is not None:
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

    def _decide(self, subject: Subject, observed: Observed) -> Decision:
        now = self._clock()
        if subject.resource is not None:
            return decide_queued_resource(subject.resource, observed, self._settings, now=now)
        return decide_deletion(
            subject.meta, subject.status, observed, self._settings, retain=subject.retain, now=now
        )


def make_queued_resource_controller(
    *,
    cluster: Cluster,
    cache: Cache,
    cloud: CloudTPU,
    settings: CloudSettings,
    metrics: Metrics,
    identity: str,
    acting: Callable[[], bool],
    clock: Callable[[], float] = time.time,
) -> QueuedResourceController:
    """Put a controller together with an observer and an applier that share one memory of the resources."""
    memory, figures = Memory(clock), metrics.queued_resources
    cloud = count_requests(cloud, figures.count_request)
    observer = Observer(
        cluster=cluster,
        cache=cache,
        cloud=cloud,
        memory=memory,
        settings=settings,
        metrics=figures,
        clock=clock,
    )
    writer = ObjectWriter(QUEUED_RESOURCES, cluster=cluster, metrics=metrics, identity=identity, clock=clock)
    applier = Applier(
        cluster=cluster, cache=cache, cloud=cloud, memory=memory, writer=writer, acting=acting, clock=clock
    )
    return QueuedResourceController(
        cache=cache,
        memory=memory,
        observer=observer,
        applier=applier,
        settings=settings,
        metrics=figures,
        acting=acting,
        clock=clock,
    )
