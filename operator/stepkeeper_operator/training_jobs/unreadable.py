"""Manage a job whose spec can't be read at all: say what is wrong, show its commits, and stop it if asked."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from stepkeeper_operator.api.base import ObjectMeta
from stepkeeper_operator.api.reading import read_object
from stepkeeper_operator.api.v1alpha1.conditions import END_CONDITIONS, ConditionType, ConditionUpdate
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cache.reports import ReportCache
from stepkeeper_operator.cluster import JOBSETS, Cluster
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.facts.raw import RawObject, condition_of, read_in
from stepkeeper_operator.kinds.writing import ObjectWriter, renew_condition
from stepkeeper_operator.training_jobs.apply import suspend_manifest
from stepkeeper_operator.training_jobs.attempts.budgets import reset_failures
from stepkeeper_operator.training_jobs.decide.status import mirror_storage
from stepkeeper_operator.training_jobs.observed import Observed

__all__ = ["UnreadableJobs"]

_BY_SPEC: Final = frozenset(
    {ConditionType.RUNNING, ConditionType.REPORTING, ConditionType.PROGRESSING, ConditionType.POD_STUCK}
)
"""Conditions of what runs, which change without the spec, and can't be judged without it."""

_NOT_JUDGED: Final = "not known while the spec can't be read; condition Accepted names what to correct"


class UnreadableJobs:
    """Do for jobs that can't be read what needs no more than their raw objects."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        reports: ReportCache,
        writer: ObjectWriter,
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._reports = reports
        self._writer = writer
        self._clock = clock

    async def manage(self, key: ObjectKey, raw: RawObject, problems: tuple[str, ...]) -> None:
        """Set condition Accepted of the job, with an event, show its commits, and stop its JobSet if the spec says so.

        Raises:
            ApiError: A write failed; the others were tried.
        """
        meta = ObjectMeta.model_validate(raw["metadata"])
        # The stop is first: the API server may keep no status with such a spec.
        try:
            await self._stop_if_asked(key, raw, meta)
        except ApiError:
            with contextlib.suppress(ApiError):
                await self._tell(raw, meta, problems)
            raise
        await self._tell(raw, meta, problems)

    async def _tell(self, raw: RawObject, meta: ObjectMeta, problems: tuple[str, ...]) -> None:
        evidence = self._cache.list_evidence(meta.uid)
        judged = _stop_judging(raw, now=self._clock())
        shown = _show_commits(judged, Observed(report=self._reports.get_report(meta.uid), evidence=evidence))
        told = await self._writer.report_unreadable(shown, problems, initial={"phase": "Pending"})
        if told is None and shown.get("status") != raw.get("status"):
            told = await self._writer.write_status(meta, shown["status"])
        if told is not None:
            self._cache.record_training_job(told)

    async def _stop_if_asked(self, key: ObjectKey, raw: RawObject, meta: ObjectMeta) -> None:
        jobset, spec = self._cache.get_jobset(key), raw.get("spec")
        asked = isinstance(spec, Mapping) and spec.get("suspend") is True
        own = jobset is not None and jobset.owner_uid == meta.uid and not jobset.is_finished
        if asked and own and jobset is not None and not jobset.deleting:
            await self._stop(jobset)

    async def _stop(self, jobset: JobSet) -> None:
        """Suspend the JobSet. One that Kueue manages is deleted: Kueue would resume it."""
        workload = self._cache.get_workload(jobset.uid)
        if Observed(jobset=jobset, workload=workload).is_queued:
            await self._cluster.delete(
                JOBSETS, jobset.namespace, jobset.name, uid=jobset.uid, foreground=True
            )
        elif not jobset.suspend:
            body = suspend_manifest(jobset, suspend=True)
            self._cache.record_jobset(await self._cluster.apply(JOBSETS, jobset.namespace, body))


def _show_commits(raw: RawObject, observed: Observed) -> RawObject:
    """Return the job with what pods say of its commits in its status. They are progress, whatever the spec says."""
    spec = raw.get("spec")
    job = read_object(CheckpointedTrainingJob, {**raw, "spec": _make_stand_in(spec)}).value
    if job is None:
        return raw
    mirror = mirror_storage(job, observed, running=None)
    if mirror.checkpoint == job.status.checkpoint:
        return raw
    update: dict[str, object] = {"checkpoint": mirror.checkpoint}
    if mirror.new_commit:
        known = job.status.operator
        starts = {"starts_without_checkpoint": min(1, known.starts_without_checkpoint)}
        update["operator"] = known.model_copy(update=starts)
        if read_in(spec, "restarts", "resetOnNewCheckpoint") is not False:
            update["restarts"] = reset_failures(job.status.restarts)
    written = job.status.model_copy(update=update).to_raw()
    new = {key: written[key] for key in ("checkpoint", "operator", "restarts") if key in written}
    return {**raw, "status": {**(raw.get("status") or {}), **new}}


def _stop_judging(raw: RawObject, *, now: float) -> RawObject:
    """Return the job with the conditions Unknown that can't be judged without its spec: they would stay for ever."""
    status = raw.get("status") or {}
    before = status.get("conditions") or []
    generation = ObjectMeta.model_validate(raw["metadata"]).generation
    if any(condition_of(raw, kind).get("status") == "True" for kind in END_CONDITIONS):
        return raw
    after = [_make_unknown(each, generation=generation, now=now) for each in before]
    return raw if after == before else {**raw, "status": {**status, "conditions": after}}


def _make_unknown(condition: RawObject, *, generation: int, now: float) -> RawObject:
    kind = condition.get("type")
    if kind not in _BY_SPEC:
        return condition
    update = ConditionUpdate(
        type=ConditionType(kind), status=None, reason=Reason.UNREADABLE_SPEC, message=_NOT_JUDGED
    )
    return renew_condition(condition, update, generation=generation, now=now)


def _make_stand_in(spec: object) -> RawObject:
    """Make a spec that can be read in place of one that can't. It has the root of this one."""
    uri = read_in(spec, "checkpoint", "uri")
    checkpoint = {
        "uri": uri if isinstance(uri, str) else "file:///unknown",
        "interval": {"every": {"steps": 1}},
    }
    return {"placement": {"hosts": {"count": 1}}, "template": {}, "checkpoint": checkpoint}
