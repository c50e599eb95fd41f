"""Which Jobs and pods are a job's own: by their owners' uids, all in its namespace. Anybody can copy a label."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from stepkeeper_operator.facts import Job, JobSet, Pod

__all__ = ["Lineage"]

_KEPT: Final = 4096
"""Of one job: pods are heard of after their Job is gone, and before it is known, but not for ever."""


@dataclass(slots=True)
class _Family:
    namespace: str | None = None
    """Of the job; None while it isn't known."""

    jobsets: dict[str, str] = field(default_factory=dict)
    """Namespaces of the JobSets that say the job controls them, by uid."""

    owners: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespaces and owners' uids of the Jobs, by uid."""

    waiting: dict[str, Job | Pod] = field(default_factory=dict)
    """What was last seen of those whose owners aren't known yet."""

    def owns(self, item: Job | Pod) -> bool:
        owner = self.owners.get(item.uid if isinstance(item, Job) else item.owner_uid or "")
        if self.namespace is None or owner is None or item.namespace != self.namespace:
            return False
        return owner[0] == self.namespace and self.jobsets.get(owner[1]) == self.namespace

    @property
    def empty(self) -> bool:
        return self.namespace is None and not (self.jobsets or self.owners or self.waiting)


class Lineage:
    """Watches bring objects in any order: every `see_…` gives what is now known to be the job's own, by its uid."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def see_training_job(self, uid: str, namespace: str) -> Iterator[Job | Pod]:
        family = self._families.setdefault(uid, _Family())
        if family.namespace == namespace:
            return iter(())
        family.namespace = namespace
        family.jobsets = {key: where for key, where in family.jobsets.items() if where == namespace}
        family.owners = {key: owner for key, owner in family.owners.items() if owner[0] == namespace}
        family.waiting = {key: item for key, item in family.waiting.items() if item.namespace == namespace}
        return _admitted(family)

    def see_jobset(self, jobset: JobSet, *, deleted: bool = False) -> Iterator[Job | Pod]:
        family = self._family(jobset.job_uid, jobset.namespace)
        if family is None or jobset.owner_uid != jobset.job_uid or jobset.uid in family.jobsets:
            return iter(())
        family.jobsets[jobset.uid] = jobset.namespace
        return self._after(jobset, family, deleted=deleted)

    def see_job(self, job: Job, *, deleted: bool = False) -> Iterator[Job | Pod]:
        family = self._family(job.job_uid, job.namespace)
        if family is None:
            return iter(())
        if job.owner_uid is not None:
            # The first owner stays: who deletes a JobSet and leaves its Jobs takes the owner out of them.
            family.owners.setdefault(job.uid, (job.namespace, job.owner_uid))
            while len(family.owners) > _KEPT:
                del family.owners[next(iter(family.owners))]
        family.waiting[job.uid] = job
        return self._after(job, family, deleted=deleted)

    def see_pod(self, pod: Pod, *, deleted: bool = False) -> Iterator[Job | Pod]:
        family = self._family(pod.job_uid, pod.namespace)
        if family is None or pod.owner_uid is None:
            return iter(())
        family.waiting[pod.uid] = pod
        return self._after(pod, family, deleted=deleted)

    def forget(self, uid: str) -> None:
        """The job is gone. What its pods still say is kept only as long as they are there."""
        self._families.pop(uid, None)

    def _family(self, uid: str, namespace: str) -> _Family | None:
        if not uid:
            return None
        family = self._families.setdefault(uid, _Family())
        return None if family.namespace not in {None, namespace} else family

    def _after(self, seen: JobSet | Job | Pod, family: _Family, *, deleted: bool) -> Iterator[Job | Pod]:
        while len(family.waiting) > _KEPT:
            del family.waiting[next(iter(family.waiting))]
        if family.namespace is not None:
            return _admitted(family)
        if deleted:
            for known in (family.jobsets, family.owners, family.waiting):
                known.pop(seen.uid, None)
            if family.empty:
                del self._families[seen.job_uid]
        return iter(())


def _admitted(family: _Family) -> Iterator[Job | Pod]:
    items = [item for item in family.waiting.values() if family.owns(item)]
    for item in items:
        del family.waiting[item.uid]
    return iter(items)
