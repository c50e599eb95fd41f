"""Reconcile one job: parse, observe, decide, apply."""

import logging
import time
from collections.abc import Callable

from pydantic import ValidationError

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.apply import Applier
from stepkeeper_operator.cache.cache import Cache, JobKey
from stepkeeper_operator.cache.memory import Memory
from stepkeeper_operator.cache.reports import ReportCache
from stepkeeper_operator.cluster import Cluster
from stepkeeper_operator.decide.job import decide_job
from stepkeeper_operator.decision import Decision
from stepkeeper_operator.errors import AlreadyExistsError, ApiError, ConflictError
from stepkeeper_operator.metrics import Metrics
from stepkeeper_operator.observe import Observer
from stepkeeper_operator.settings import OperatorSettings

__all__ = ["Reconciler", "make_reconciler"]

_log = logging.getLogger(__name__)

_CONFLICT_RETRY_S = 0.5
"""Seconds to look again after a conflict, if the watch doesn't bring the missing change before."""


class Reconciler:
    """Reconcile the jobs that the queue hands out."""

    def __init__(
        self,
        *,
        cache: Cache,
        reports: ReportCache,
        memory: Memory,
        observer: Observer,
        applier: Applier,
        settings: OperatorSettings,
        metrics: Metrics,
        acting: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._reports = reports
        self._memory = memory
        self._observer = observer
        self._applier = applier
        self._settings = settings
        self._metrics = metrics
        self._acting = acting
        self._clock = clock
        self._uids: dict[JobKey, str] = {}

    async def reconcile(self, key: JobKey) -> float | None:
        """Bring the job to its wanted state, or return in how many seconds to look again. Raises to be tried again."""
        started = time.monotonic()
        try:
            again_s = await self._reconcile(key)
        except (ConflictError, AlreadyExistsError) as error:
            _log.debug("behind", extra={"job": "/".join(key), "error": str(error)})
            self._metrics.reconciles.labels(result="behind").inc()
            return _CONFLICT_RETRY_S
        except Exception as error:
            expected = isinstance(error, (ApiError, OSError, TimeoutError))
            _log.warning(
                "cannot reconcile", extra={"job": "/".join(key), "error": str(error)}, exc_info=not expected
            )
            self._metrics.reconciles.labels(result="error").inc()
            raise
        self._metrics.reconciles.labels(result="done").inc()
        self._metrics.reconcile_seconds.observe(time.monotonic() - started)
        return again_s

    async def _reconcile(self, key: JobKey) -> float | None:
        raw = self._cache.get_training_job(key)
        if raw is None:
            self._forget_job(key)
            return None
        try:
            job = CheckpointedTrainingJob.model_validate(raw)
        except ValidationError as error:
            _log.error(
                "cannot read job; is its CRD newer?", extra={"job": "/".join(key), "error": str(error)}
            )
            return None
        self._uids[key] = job.metadata.uid
        observed = await self._observer.observe(key, job)
        decision = decide_job(job, observed, self._settings, now=self._clock())
        # Requests take time: between two of them another operator may have taken over.
        if not self._acting():
            return _CONFLICT_RETRY_S
        await self._applier.apply_decision(key, job, decision)
        self._update_metrics(key, job, decision)
        return decision.requeue_after_s

    def _update_metrics(self, key: JobKey, job: CheckpointedTrainingJob, decision: Decision) -> None:
        progress, checkpoint = decision.status.progress, decision.status.checkpoint
        if progress is not None and progress.step is not None:
            self._metrics.step.labels(*key).set(progress.step)
        if checkpoint is not None and checkpoint.latest is not None:
            self._metrics.committed_step.labels(*key).set(checkpoint.latest.step)
        if decision.write_status:
            ended = {attempt.number for attempt in job.status.attempts if attempt.end is not None}
            for attempt in decision.status.attempts:
                if attempt.end is not None and attempt.cause is not None and attempt.number not in ended:
                    self._metrics.restarts.labels(cause=attempt.cause).inc()

    def _forget_job(self, key: JobKey) -> None:
        uid = self._uids.pop(key, None)
        if uid is not None:
            self._reports.forget_job(uid)
            self._memory.forget_job(uid)
            self._metrics.forget_job(*key)


def make_reconciler(
    *,
    cluster: Cluster,
    cache: Cache,
    reports: ReportCache,
    settings: OperatorSettings,
    metrics: Metrics,
    ca_pem: Callable[[], str],
    acting: Callable[[], bool],
    clock: Callable[[], float] = time.time,
) -> Reconciler:
    """Put a reconciler together with an observer and an applier that share one memory of the jobs."""
    memory = Memory(started_at=clock())
    observer = Observer(
        cluster=cluster,
        cache=cache,
        reports=reports,
        memory=memory,
        ca_pem=ca_pem,
        resync_s=settings.resync_s,
        clock=clock,
    )
    applier = Applier(
        cluster=cluster, cache=cache, memory=memory, metrics=metrics, identity=settings.identity, clock=clock
    )
    return Reconciler(
        cache=cache,
        reports=reports,
        memory=memory,
        observer=observer,
        applier=applier,
        settings=settings,
        metrics=metrics,
        acting=acting,
        clock=clock,
    )
