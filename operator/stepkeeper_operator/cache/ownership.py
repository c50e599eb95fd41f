"""Find the Jobs and pods that belong to a job, by their owners' uids within its namespace. Anybody can copy a label."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from stepkeeper_operator.facts import BatchJob, JobSet, Pod

__all__ = ["OwnershipTracker"]

_KEPT_OBJECTS: Final = 4096
"""Objects kept for one job. Pods arrive after their Job is gone, and before it is known, but not for ever."""


@dataclass(slots=True)
class _OwnedObjects:
    namespace: str | None = None
    """Namespace of the job; None while the job isn't known."""

    jobsets: dict[str, str] = field(default_factory=dict)
    """Namespaces of the JobSets whose controller is the job, by uid."""

    owners: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and owner's uid of each Job, by the Job's uid."""

    waiting: dict[str, BatchJob | Pod] = field(default_factory=dict)
    """Last state of the objects whose owners aren't known yet."""

    def owns(self, item: BatchJob | Pod) -> bool:
        owner = self.owners.get(item.uid if isinstance(item, BatchJob) else item.owner_uid or "")
        if self.namespace is None or owner is None or item.namespace != self.namespace:
            return False
        return owner[0] == self.namespace and self.jobsets.get(owner[1]) == self.namespace

    @property
    def empty(self) -> bool:
        return self.namespace is None and not (self.jobsets or self.owners or self.waiting)


class OwnershipTracker:
    """Match objects to jobs in whatever order watches bring them.

    Each `record_…` returns the objects that it has just proved to belong to the job with their uid.
    """

    def __init__(self) -> None:
        self._objects_by_job: dict[str, _OwnedObjects] = {}

    def record_training_job(self, uid: str, namespace: str) -> Iterator[BatchJob | Pod]:
        objects = self._objects_by_job.setdefault(uid, _OwnedObjects())
        if objects.namespace == namespace:
            return iter(())
        objects.namespace = namespace
        objects.jobsets = {key: where for key, where in objects.jobsets.items() if where == namespace}
        objects.owners = {key: owner for key, owner in objects.owners.items() if owner[0] == namespace}
        objects.waiting = {key: item for key, item in objects.waiting.items() if item.namespace == namespace}
        return _take_owned(objects)

    def record_jobset(self, jobset: JobSet, *, deleted: bool = False) -> Iterator[BatchJob | Pod]:
        objects = self._get_objects(jobset.job_uid, jobset.namespace)
        if objects is None or jobset.owner_uid != jobset.job_uid or jobset.uid in objects.jobsets:
            return iter(())
        objects.jobsets[jobset.uid] = jobset.namespace
        return self._match_waiting(jobset, objects, deleted=deleted)

    def record_batch_job(self, batch_job: BatchJob, *, deleted: bool = False) -> Iterator[BatchJob | Pod]:
        objects = self._get_objects(batch_job.job_uid, batch_job.namespace)
        if objects is None:
            return iter(())
        if batch_job.owner_uid is not None:
            # Keep the first owner: deleting a JobSet without its Jobs removes the owner from them.
            objects.owners.setdefault(batch_job.uid, (batch_job.namespace, batch_job.owner_uid))
            while len(objects.owners) > _KEPT_OBJECTS:
                del objects.owners[next(iter(objects.owners))]
        objects.waiting[batch_job.uid] = batch_job
        return self._match_waiting(batch_job, objects, deleted=deleted)

    def record_pod(self, pod: Pod, *, deleted: bool = False) -> Iterator[BatchJob | Pod]:
        objects = self._get_objects(pod.job_uid, pod.namespace)
        if objects is None or pod.owner_uid is None:
            return iter(())
        objects.waiting[pod.uid] = pod
        return self._match_waiting(pod, objects, deleted=deleted)

    def forget_job(self, uid: str) -> None:
        """Forget a job that is gone. What its pods still report is kept only while they exist."""
        self._objects_by_job.pop(uid, None)

    def _get_objects(self, uid: str, namespace: str) -> _OwnedObjects | None:
        if not uid:
            return None
        objects = self._objects_by_job.setdefault(uid, _OwnedObjects())
        return None if objects.namespace not in {None, namespace} else objects

    def _match_waiting(
        self, seen: JobSet | BatchJob | Pod, objects: _OwnedObjects, *, deleted: bool
    ) -> Iterator[BatchJob | Pod]:
        while len(objects.waiting) > _KEPT_OBJECTS:
            del objects.waiting[next(iter(objects.waiting))]
        if objects.namespace is not None:
            return _take_owned(objects)
        if deleted:
            for known in (objects.jobsets, objects.owners, objects.waiting):
                known.pop(seen.uid, None)
            if objects.empty:
                del self._objects_by_job[seen.job_uid]
        return iter(())


def _take_owned(objects: _OwnedObjects) -> Iterator[BatchJob | Pod]:
    items = [item for item in objects.waiting.values() if objects.owns(item)]
    for item in items:
        del objects.waiting[item.uid]
    return iter(items)
