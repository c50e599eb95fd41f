"""Manage a job whose spec cannot be read at all: report the problems and commits, and stop it if requested."""

from dataclasses import dataclass
from typing import Final

from stepkeeper_operator.api.base import ObjectMeta
from stepkeeper_operator.api.reading import read_object
from stepkeeper_operator.api.v1alpha1.conditions import END_CONDITIONS, ConditionType, ConditionUpdate
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cache.reports import ReportCache
from stepkeeper_operator.cluster.resources import JOBSETS
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts.raw import RawObject, condition_of, get_nested
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.kinds.writing import ObjectWriter, renew_condition
from stepkeeper_operator.training_jobs.apply import suspend_manifest
from stepkeeper_operator.training_jobs.attempts.budgets import reset_failures
from stepkeeper_operator.training_jobs.decide.status import mirror_storage
from stepkeeper_operator.training_jobs.observed import Observed

__all__ = ["UnreadableJobs"]

_BY_SPEC: Final = frozenset(
    {ConditionType.RUNNING, ConditionType.REPORTING, ConditionType.PROGRESSING, ConditionType.POD_STUCK}
)
"""Conditions of the running attempt, which cannot be judged without the spec."""

_NOT_JUDGED: Final = "unknown while the spec cannot be read: see condition Accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableJobs:
    """Manage unreadable jobs by their raw objects. Their running pods continue unless `spec.suspend` is true."""

    shared: Shared
    reports: ReportCache
    writer: ObjectWriter

    async def manage(self, key: ObjectKey, raw: RawObject, problems: tuple[str, ...]) -> None:
        """Stop the JobSet if requested, and report the problems and commits even if that fails. Raises ApiError."""
        meta = ObjectMeta.model_validate(raw["metadata"])
        # Stop first: the API server may refuse a status for such a spec.
        try:
            await self._stop_if_requested(key, raw, meta)
        except ApiError:
            await self._report(raw, meta, problems)
            raise
        await self._report(raw, meta, problems)

    async def _report(self, raw: RawObject, meta: ObjectMeta, problems: tuple[str, ...]) -> None:
        evidence = self.shared.cache.list_evidence(meta.uid)
        judged = _reset_conditions(raw, now=self.shared.clock())
        shown = _show_commits(judged, Observed(report=self.reports.get_report(meta.uid), evidence=evidence))
        written = await self.writer.report_unreadable(shown, problems, initial={"phase": "Pending"})
        if written is None and shown.get("status") != raw.get("status"):
            # That wrote nothing, so the changed commits and conditions are not written yet.
            written = await self.writer.write_status(meta, shown["status"])
        if written is not None:
            self.shared.cache.record_training_job(written)

    async def _stop_if_requested(self, key: ObjectKey, raw: RawObject, meta: ObjectMeta) -> None:
        """Suspend the JobSet, or delete it if Kueue manages it: Kueue would resume it."""
        jobset = self.shared.cache.get_jobset(key)
        if jobset is None or jobset.owner_uid != meta.uid or jobset.is_finished or jobset.deleting:
            return
        if get_nested(raw, "spec", "suspend") is not True:
            return
        workload = self.shared.cache.get_workload(jobset.uid)
        if Observed(jobset=jobset, workload=workload).is_queued:
            await self.shared.cluster.delete(
                JOBSETS, jobset.namespace, jobset.name, uid=jobset.uid, foreground=True
            )
        elif not jobset.suspend:
            body = suspend_manifest(jobset, suspend=True)
            self.shared.cache.record_jobset(await self.shared.cluster.apply(JOBSETS, jobset.namespace, body))


def _show_commits(raw: RawObject, observed: Observed) -> RawObject:
    """Return the job with the commits that its pods reported in its status."""
    spec = raw.get("spec")
    job = read_object(CheckpointedTrainingJob, {**raw, "spec": _make_placeholder(spec)}).value
    if job is None:
        return raw
    mirror = mirror_storage(job, observed, running=None)
    if mirror.checkpoint == job.status.checkpoint:
        return raw
    update: dict[str, object] = {"checkpoint": mirror.checkpoint}
    if mirror.new_commit:
        operator = job.status.operator
        # It is unknown which of the starts made the commit: the newest may have made none.
        starts = {"starts_without_checkpoint": min(1, operator.starts_without_checkpoint)}
        update["operator"] = operator.model_copy(update=starts)
        if get_nested(spec, "restarts", "resetOnNewCheckpoint") is not False:
            update["restarts"] = reset_failures(job.status.restarts)
    written = job.status.model_copy(update=update).to_raw()
    new = {key: written[key] for key in ("checkpoint", "operator", "restarts") if key in written}
    return {**raw, "status": {**(raw.get("status") or {}), **new}}


def _reset_conditions(raw: RawObject, *, now: float) -> RawObject:
    """Return the job with status Unknown in the conditions that cannot be judged without its spec."""
    status = raw.get("status") or {}
    before = status.get("conditions") or []
    generation = ObjectMeta.model_validate(raw["metadata"]).generation
    if any(condition_of(raw, kind).get("status") == "True" for kind in END_CONDITIONS):
        return raw  # the conditions of an ended job are final
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


def _make_placeholder(spec: object) -> RawObject:
    """Make a readable spec with the same root to replace an unreadable one."""
    uri = get_nested(spec, "checkpoint", "uri")
    checkpoint = {
        "uri": uri if isinstance(uri, str) else "file:///unknown",
        "interval": {"every": {"steps": 1}},
    }
    return {"placement": {"hosts": {"count": 1}}, "template": {}, "checkpoint": checkpoint}
