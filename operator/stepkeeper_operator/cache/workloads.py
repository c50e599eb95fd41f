"""Keep Kueue's Workloads of JobSets."""

from collections.abc import Iterator

from stepkeeper_operator.cache.keys import ObjectKey, job_key
from stepkeeper_operator.facts import Workload, read_workload
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["Workloads"]


class Workloads:
    """Keep the Workloads that JobSets own. Those of other kinds are left out."""

    def __init__(self) -> None:
        self._workloads: dict[str, Workload] = {}

    def record(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        """Record the Workload. It concerns the job that has the name of its JobSet."""
        workload = read_workload(raw)
        known = self._workloads.pop(workload.uid, None)
        if not deleted and workload.jobset_uid:
            self._workloads[workload.uid] = workload
        elif known is None:
            return ()
        return () if known == workload and not deleted else (_key_of(known or workload),)

    def get(self, jobset_uid: str) -> Workload | None:
        """Return the Workload that the JobSet owns."""
        return next((w for w in self._workloads.values() if w.jobset_uid == jobset_uid), None)

    def list_uids(self) -> frozenset[str]:
        return frozenset(self._workloads)

    def forget(self, gone: frozenset[str]) -> Iterator[ObjectKey]:
        for uid in gone & frozenset(self._workloads):
            yield _key_of(self._workloads.pop(uid))


def _key_of(workload: Workload) -> ObjectKey:
    return job_key(workload.namespace, workload.jobset_name)
