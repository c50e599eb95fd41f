"""Find the jobs that keep their checkpoints in one root, or one inside the other's."""

from collections import defaultdict

from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.facts import CheckpointRoot, JobRoot, read_job_root
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["JobRoots"]


class JobRoots:
    """Index jobs by their root and by all folders above it."""

    def __init__(self) -> None:
        self._roots: dict[ObjectKey, JobRoot] = {}
        self._below: defaultdict[CheckpointRoot, set[ObjectKey]] = defaultdict(set)
        """By folder: the jobs whose root it is, or holds."""

    def update(self, key: ObjectKey, raw: RawObject | None) -> None:
        """Take note of the root that the job has now; None: there is no such job any more."""
        before = self._roots.pop(key, None)
        if before is not None:
            for folder in _list_folders(before.place):
                self._below[folder].discard(key)
                if not self._below[folder]:
                    del self._below[folder]
        root = None if raw is None else read_job_root(raw)
        if root is not None:
            self._roots[key] = root
            for folder in _list_folders(root.place):
                self._below[folder].add(key)

    def list_rivals(self, key: ObjectKey) -> tuple[JobRoot, ...]:
        """List the other jobs whose root is this job's, is inside of it or around it, in the order of their keys."""
        own = self._roots.get(key)
        if own is None:
            return ()
        inside = self._below.get(own.place, set())
        above = [folder for folder in _list_folders(own.place) if folder != own.place]
        around = {
            other for folder in above for other in self._below[folder] if self._roots[other].place == folder
        }
        return tuple(self._roots[other] for other in sorted((inside | around) - {key}))


def _list_folders(place: CheckpointRoot) -> list[CheckpointRoot]:
    return [place[:depth] for depth in range(1, len(place) + 1)]
