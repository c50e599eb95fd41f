"""Manage a job whose spec can't be read at all: say what is wrong with it, and stop it if it is to be suspended."""

from collections.abc import Mapping

from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cluster import JOBSETS, Cluster
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.training_jobs.apply import suspend_manifest
from stepkeeper_operator.writing import ObjectWriter

__all__ = ["UnreadableJobs"]


class UnreadableJobs:
    """Do for jobs that can't be read what needs no more than their raw objects."""

    def __init__(self, *, cluster: Cluster, cache: Cache, writer: ObjectWriter) -> None:
        self._cluster = cluster
        self._cache = cache
        self._writer = writer

    async def manage(self, key: ObjectKey, raw: RawObject, problems: tuple[str, ...]) -> None:
        """Set condition Accepted of the job, with an event, and stop its JobSet if the spec says so.

        Raises:
            ApiError: A write failed.
        """
        meta = ObjectMeta.model_validate(raw["metadata"])
        # First: the API server may keep no status with such a spec.
        await self._stop_if_asked(key, raw, meta)
        told = await self._writer.tell_unreadable(raw, problems, initial={"phase": "Pending"})
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
