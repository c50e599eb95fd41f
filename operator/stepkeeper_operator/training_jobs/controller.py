"""Reconcile one job: parse, observe, decide, apply."""

import logging
import time
from collections.abc import Callable

from stepkeeper_operator.api.reading import read_object
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cache.memory import Memory
from stepkeeper_operator.cache.reports import ReportCache
from stepkeeper_operator.cluster import TRAINING_JOBS, Cluster, Resource
from stepkeeper_operator.decide.job import decide_job
from stepkeeper_operator.decide.progressing import is_stalled
from stepkeeper_operator.decide.stuck_pods import is_pod_stuck
from stepkeeper_operator.decision import Decision
from stepkeeper_operator.metrics import Metrics
from stepkeeper_operator.reconcile import RETRY_SOON_S
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.training_jobs.apply import Applier
from stepkeeper_operator.training_jobs.observe import Observer
from stepkeeper_operator.training_jobs.unreadable import UnreadableJobs
from stepkeeper_operator.writing import ObjectWriter

__all__ = ["JobController"]

_log = logging.getLogger(__name__)


class JobController:
    """Implement `Controller` for CheckpointedTrainingJobs."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        reports: ReportCache,
        settings: OperatorSettings,
        metrics: Metrics,
        ca_pem: Callable[[], str],
        acting: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._reports = reports
        self._settings = settings
        self._metrics = metrics
        self._acting = acting
        self._clock = clock
        self._memory = Memory(started_at=clock())
        writer = ObjectWriter(
            TRAINING_JOBS, cluster=cluster, metrics=metrics, identity=settings.identity, clock=clock
        )
        self._observer = Observer(
            cluster=cluster,
            cache=cache,
            reports=reports,
            memory=self._memory,
            ca_pem=ca_pem,
            settings=settings,
            clock=clock,
        )
        self._applier = Applier(cluster=cluster, cache=cache, memory=self._memory, writer=writer, clock=clock)
        self._unreadable = UnreadableJobs(
            cluster=cluster, cache=cache, reports=reports, writer=writer, clock=clock
        )
        self._uids: dict[ObjectKey, str] = {}

    @property
    def resource(self) -> Resource:
        return TRAINING_JOBS

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Bring the job to its wanted state, or return in how many seconds to look again. Raises to be tried again."""
        raw = self._cache.get_training_job(key)
        assert raw is not None  # the cache knows the key
        reading = read_object(CheckpointedTrainingJob, raw)
        if reading.problems:
            _log.warning("cannot read job", extra={**key.log_fields, "error": "; ".join(reading.problems)})
        job = reading.value
        if job is None:
            if self._acting():
                self._metrics.forget_judgements(key.namespace, key.name)
                await self._unreadable.manage(key, raw, reading.problems)
            return None
        self._uids[key] = job.metadata.uid
        observed = await self._observer.observe(key, job, reading.problems)
        decision = decide_job(job, observed, self._settings, now=self._clock())
        # Requests take time: between two of them another operator may have taken over.
        if not self._acting():
            return RETRY_SOON_S
        outcome = await self._applier.apply_decision(key, job, decision)
        if outcome.told:
            # Only what the status says is asked for: a restarted operator goes on with the same request.
            self._reports.set_save_request(job.metadata.uid, decision.save_request)
            self._update_metrics(key, job, decision)
        if outcome.failures:
            raise outcome.failures[0]
        return decision.requeue_after_s if outcome.settled else RETRY_SOON_S

    def forget(self, key: ObjectKey) -> None:
        """Drop the reports, the memory and the gauges of a job that is gone."""
        uid = self._uids.pop(key, None)
        if uid is not None:
            self._reports.forget_job(uid)
            self._memory.forget_job(uid)
            self._metrics.forget_job(key.namespace, key.name)

    def _update_metrics(self, key: ObjectKey, job: CheckpointedTrainingJob, decision: Decision) -> None:
        progress, checkpoint = decision.status.progress, decision.status.checkpoint
        if progress is not None and progress.step is not None:
            self._metrics.step.labels(key.namespace, key.name).set(progress.step)
        if checkpoint is not None and checkpoint.latest is not None:
            self._metrics.committed_step.labels(key.namespace, key.name).set(checkpoint.latest.step)
        starts = decision.status.bookkeeping.starts_without_checkpoint
        self._metrics.starts_without_checkpoint.labels(key.namespace, key.name).set(starts)
        self._metrics.stalled.labels(key.namespace, key.name).set(is_stalled(decision.status))
        self._metrics.pod_stuck.labels(key.namespace, key.name).set(is_pod_stuck(decision.status))
        if decision.write_status:
            ended = {attempt.number for attempt in job.status.attempts if attempt.end is not None}
            for attempt in decision.status.attempts:
                if attempt.end is not None and attempt.cause is not None and attempt.number not in ended:
                    self._metrics.restarts.labels(cause=attempt.cause).inc()
