"""Manage a job whose spec can't be read at all: say what is wrong with it, and stop it if it is to be suspended."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionType
from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cluster import JOBSETS, Cluster
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.facts.raw import RawObject, condition_of, render_time
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.training_jobs.apply import suspend_manifest
from stepkeeper_operator.writing import ObjectWriter

__all__ = ["UnreadableJobs"]

_REASON: Final = "UnreadableSpec"
_MESSAGE_LIMIT: Final = 2048


class UnreadableJobs:
    """Do for jobs that can't be read what needs no more than their raw objects."""

    def __init__(
        self, *, cluster: Cluster, cache: Cache, writer: ObjectWriter, clock: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._writer = writer
        self._clock = clock

    async def manage(self, key: ObjectKey, raw: RawObject, problems: tuple[str, ...]) -> None:
        """Set condition Accepted of the job, with an event, and stop its JobSet if the spec says so.

        Raises:
            ApiError: A write failed.
        """
        meta = ObjectMeta.model_validate(raw["metadata"])
        # First: the API server may keep no status with such a spec.
        await self._stop_if_asked(key, raw, meta)
        status = refuse(raw, problems, generation=meta.generation, now=self._clock())
        if status is not None:
            self._cache.record_training_job(await self._writer.write_status(meta, status))
            message = condition_of({"status": status}, ConditionType.ACCEPTED)["message"]
            await self._writer.create_event(meta, ObjectEvent(warning=True, reason=_REASON, message=message))

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


def refuse(
    raw: RawObject, problems: tuple[str, ...], *, generation: int, now: float
) -> Mapping[str, Any] | None:
    """Return the job's status with Accepted=False that names the problems, or None if it says so already."""
    text = f"this operator can't read {'; '.join(problems)}. Mend it; what already runs goes on"
    known = condition_of(raw, ConditionType.ACCEPTED)
    text = text[:_MESSAGE_LIMIT]
    if (known.get("status"), known.get("reason"), known.get("message")) == ("False", _REASON, text):
        return None
    since = known["lastTransitionTime"] if known.get("status") == "False" else render_time(now)
    refused = {
        "type": ConditionType.ACCEPTED.value,
        "status": "False",
        "reason": _REASON,
        "message": text,
        "lastTransitionTime": since,
        "observedGeneration": generation,
    }
    status = raw.get("status") or {}
    others = [c for c in status.get("conditions") or () if c.get("type") != ConditionType.ACCEPTED]
    return {"phase": "Pending", **status, "conditions": [refused, *others]}
