"""Reconcile one job: parse, observe, decide, apply."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from typing_extensions import override

from stepkeeper_operator.api.reading import read_object
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cache.reports import ReportCache
from stepkeeper_operator.cluster.resources import TRAINING_JOBS
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.kinds.controller import RETRY_SOON_S, KindController
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.training_jobs.apply import Applier
from stepkeeper_operator.training_jobs.decide.job import decide_job
from stepkeeper_operator.training_jobs.decide.progressing import is_stalled
from stepkeeper_operator.training_jobs.decide.save_requests import find_open_request
from stepkeeper_operator.training_jobs.decide.terminating_pods import is_pod_stuck
from stepkeeper_operator.training_jobs.decision import Decision
from stepkeeper_operator.training_jobs.observe import Observer
from stepkeeper_operator.training_jobs.observed import Memory, Observed

__all__ = ["JobController"]

_log = logging.getLogger(__name__)

_STAND_IN: Final[Mapping[str, Any]] = {
    "spec": {
        "placement": {"hosts": {"count": 1}},
        "template": {"spec": {"containers": []}},
        "checkpoint": {"uri": "file:///unknown", "interval": {"every": {"steps": 1}}},
    }
}
"""Required parts of a spec that can't be read. Pods start from `Observed.kept_jobset`, and never from these."""


class JobController(KindController[CheckpointedTrainingJob, Observed, Decision]):
    """Reconcile CheckpointedTrainingJobs."""

    def __init__(
        self, shared: Shared, *, reports: ReportCache, settings: OperatorSettings, ca_pem: Callable[[], str]
    ) -> None:
        super().__init__(TRAINING_JOBS, shared)
        self._reports = reports
        self._settings = settings
        self._metrics = shared.metrics
        self._memory = memory = Memory(started_at=shared.clock())
        self._observer = Observer(
            shared=shared, reports=reports, memory=memory, ca_pem=ca_pem, settings=settings
        )
        self._applier = Applier(shared=shared, memory=memory, writer=self._writer)

    @override
    def _read(self, key: ObjectKey, raw: RawObject) -> tuple[CheckpointedTrainingJob | None, tuple[str, ...]]:
        reading = read_object(CheckpointedTrainingJob, raw, stand_in=_STAND_IN)
        if reading.problems:
            _log.warning("cannot read job", extra={**key.log_fields, "error": "; ".join(reading.problems)})
        return reading.value, reading.problems

    @override
    async def _manage_unreadable(self, key: ObjectKey, raw: RawObject, problems: tuple[str, ...]) -> None:
        await self._writer.report_unreadable(raw, problems, initial={"phase": "Pending"})

    @override
    async def _observe(
        self, key: ObjectKey, subject: CheckpointedTrainingJob, problems: tuple[str, ...]
    ) -> Observed:
        return await self._observer.observe(key, subject, problems)

    @override
    def _decide(self, subject: CheckpointedTrainingJob, observed: Observed, *, now: float) -> Decision:
        return decide_job(subject, observed, self._settings, now=now)

    @override
    async def _apply(
        self, key: ObjectKey, subject: CheckpointedTrainingJob, observed: Observed, decision: Decision
    ) -> float | None:
        outcome = await self._applier.apply_decision(key, subject, decision)
        if outcome.status_written:
            # Send only a request that the status records, so that a restarted operator sends the same one.
            request = find_open_request(decision.status)
            self._reports.set_save_request(subject.metadata.uid, request)
            self._update_metrics(key, subject, decision)
        if outcome.failures:
            raise outcome.failures[0]
        return decision.requeue_after_s if outcome.settled else RETRY_SOON_S

    @override
    def _forget_object(self, key: ObjectKey, uid: str) -> None:
        self._reports.forget_job(uid)
        self._memory.forget_job(uid)
        self._metrics.forget_job(key.namespace, key.name)

    def _update_metrics(self, key: ObjectKey, job: CheckpointedTrainingJob, decision: Decision) -> None:
        progress, checkpoint = decision.status.progress, decision.status.checkpoint
        if progress is not None and progress.step is not None:
            self._metrics.step.labels(key.namespace, key.name).set(progress.step)
        if checkpoint is not None and checkpoint.latest is not None:
            self._metrics.committed_step.labels(key.namespace, key.name).set(checkpoint.latest.step)
        starts = decision.status.operator.starts_without_checkpoint
        self._metrics.starts_without_checkpoint.labels(key.namespace, key.name).set(starts)
        self._metrics.stalled.labels(key.namespace, key.name).set(is_stalled(decision.status))
        self._metrics.pod_stuck.labels(key.namespace, key.name).set(is_pod_stuck(decision.status))
        if decision.write_status:
            ended = {attempt.number for attempt in job.status.attempts if attempt.end is not None}
            for attempt in decision.status.attempts:
                if attempt.end is not None and attempt.cause is not None and attempt.number not in ended:
                    self._metrics.restarts.labels(cause=attempt.cause).inc()
