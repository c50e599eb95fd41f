"""Index jobs by what they share: the root of their checkpoints, and the QueuedResource on whose nodes they run."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import Generic, TypeVar

from stepkeeper_operator.cache.keys import ObjectKey, queued_resource_key
from stepkeeper_operator.facts import CheckpointRoot, JobRoot, read_job_root
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["JobRoots", "QueuedResourceJobs"]

T = TypeVar("T", bound=Hashable)


class _Index(Generic[T]):
    """The jobs at each place, where a job can have several."""

    def __init__(self) -> None:
        self._places: dict[ObjectKey, Collection[T]] = {}
        self._jobs: defaultdict[T, set[ObjectKey]] = defaultdict(set)

    def put(self, job: ObjectKey, places: Collection[T]) -> None:
        """Put the job at these places and no others."""
        for place in self._places.pop(job, ()):
            self._jobs[place].discard(job)
            if not self._jobs[place]:
                del self._jobs[place]
        if places:
            self._places[job] = places
        for place in places:
            self._jobs[place].add(job)

    def get_jobs(self, place: T) -> Collection[ObjectKey]:
        return self._jobs.get(place, ())


class JobRoots:
    """Find the jobs that keep their checkpoints in one root, or one inside the other's."""

    def __init__(self) -> None:
        self._roots: dict[ObjectKey, JobRoot] = {}
        self._below = _Index[CheckpointRoot]()
        """By folder: the jobs whose root it is, or holds."""

    def update(self, key: ObjectKey, raw: RawObject | None) -> None:
        """Take note of the root that the job has now; None: there is no such job any more."""
        root = None if raw is None else read_job_root(raw)
        self._below.put(key, () if root is None else _list_folders(root.place))
        self._roots.pop(key, None)
        if root is not None:
            self._roots[key] = root

    def list_rivals(self, key: ObjectKey) -> tuple[JobRoot, ...]:
        """List the other jobs whose root is this job's, is inside of it or around it, in the order of their keys."""
        own = self._roots.get(key)
        if own is None:
            return ()
        inside = set(self._below.get_jobs(own.place))
        around = {
            other
            for folder in _list_folders(own.place)
            for other in self._below.get_jobs(folder)
            if self._roots[other].place == folder
        }
        return tuple(self._roots[other] for other in sorted((inside | around) - {key}))


class QueuedResourceJobs:
    """Find the jobs that run on the nodes of a QueuedResource: those of its namespace whose placement names it."""

    def __init__(self) -> None:
        self._jobs = _Index[ObjectKey]()

    def update(self, job: ObjectKey, raw: RawObject | None) -> None:
        """Take note of the name that the job's manifest has now; None: there is no such job any more."""
        name = None if raw is None else _read_name(raw)
        self._jobs.put(job, () if name is None else (queued_resource_key(job.namespace, name),))

    def list_jobs(self, queued_resource: ObjectKey) -> tuple[ObjectKey, ...]:
        """List the keys of the jobs that name the QueuedResource, in order."""
        return tuple(sorted(self._jobs.get_jobs(queued_resource)))


def _list_folders(place: CheckpointRoot) -> list[CheckpointRoot]:
    return [place[:depth] for depth in range(1, len(place) + 1)]


def _read_name(raw: RawObject) -> str | None:
    """Read the name. None also for a spec that is none: the API server may know another CRD than this operator."""
    found: object = raw
    for part in ("spec", "placement", "tpu", "queuedResourceName"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else None
