"""Find the jobs that run on the nodes of a QueuedResource: those that name it in their placement."""

from collections import defaultdict
from collections.abc import Mapping

from stepkeeper_operator.cache.keys import ObjectKey, queued_resource_key
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["QueuedResourceJobs"]


class QueuedResourceJobs:
    """Index jobs by the QueuedResource, of their own namespace, that `spec.placement.tpu` names."""

    def __init__(self) -> None:
        self._named: dict[ObjectKey, ObjectKey] = {}
        self._jobs: defaultdict[ObjectKey, set[ObjectKey]] = defaultdict(set)

    def update(self, job: ObjectKey, raw: RawObject | None) -> None:
        """Take note of the name that the job's manifest has now; None: there is no such job any more."""
        before = self._named.pop(job, None)
        if before is not None:
            self._jobs[before].discard(job)
            if not self._jobs[before]:
                del self._jobs[before]
        name = None if raw is None else _read_name(raw)
        if name is not None:
            self._named[job] = queued_resource_key(job.namespace, name)
            self._jobs[self._named[job]].add(job)

    def list_jobs(self, queued_resource: ObjectKey) -> tuple[ObjectKey, ...]:
        """List the keys of the jobs that name the QueuedResource, in order."""
        return tuple(sorted(self._jobs.get(queued_resource, ())))


def _read_name(raw: RawObject) -> str | None:
    """Read the name. None also for a spec that is none: the API server may know another CRD than this operator."""
    found: object = raw
    for part in ("spec", "placement", "tpu", "queuedResourceName"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else None
