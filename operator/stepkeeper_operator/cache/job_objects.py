"""Keep what runs for jobs: JobSets, Workloads, batch Jobs and pods, and the last state of those that are gone."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from stepkeeper_operator.cache.evidence import EvidenceCache
from stepkeeper_operator.cache.keys import ObjectKey, job_key
from stepkeeper_operator.cache.ownership import OwnershipTracker
from stepkeeper_operator.facts import (
    BatchJob,
    JobSet,
    Pod,
    Workload,
    read_batch_job,
    read_jobset,
    read_pod,
    read_workload,
)
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.labels import WORKER_JOB

__all__ = ["JobObjects", "Workloads"]


class JobObjects:
    """Keep the objects of jobs. `find_job` finds the key of the job with a uid, if it is in that namespace.

    Each `record_…` and `forget_…` returns the keys of the jobs that the change concerns.
    """

    def __init__(self, find_job: Callable[[str, str], tuple[ObjectKey, ...]]) -> None:
        self._find_job = find_job
        self.evidence = EvidenceCache()
        self._ownership = OwnershipTracker()
        self._jobsets: dict[ObjectKey, JobSet] = {}
        self._batch_jobs: dict[str, BatchJob] = {}
        self._pods: dict[tuple[str, str], Pod] = {}
        self._pods_of: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)

    def add_job(self, uid: str, namespace: str) -> None:
        """Take what was seen before the job for the job's, where its owners prove that."""
        self._add_owned(self._ownership.record_training_job(uid, namespace))

    def forget_job(self, uid: str) -> None:
        """Forget the evidence of a job that is gone."""
        self.evidence.forget_job(uid)
        self._ownership.forget_job(uid)

    def record_jobset(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        jobset = read_jobset(raw)
        self._add_owned(self._ownership.record_jobset(jobset, deleted=deleted))
        key = job_key(jobset.namespace, jobset.name)
        known = self._jobsets.get(key)
        if not deleted:
            self._jobsets[key] = jobset
        elif known is not None and known.uid == jobset.uid:
            del self._jobsets[key]
        return (key,)

    def record_batch_job(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        batch_job = read_batch_job(raw)
        if deleted:
            self._batch_jobs.pop(batch_job.uid, None)
        else:
            self._batch_jobs[batch_job.uid] = batch_job
        self._add_owned(self._ownership.record_batch_job(batch_job, deleted=deleted))
        return self._find_job(batch_job.job_uid, batch_job.namespace)

    def record_pod(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        pod = read_pod(raw)
        name = (pod.namespace, pod.name)
        known = self._pods.get(name)
        if not deleted:
            self._pods[name] = pod
        elif known is not None and known.uid == pod.uid:
            self._drop_pod(name)
        self._add_owned(self._ownership.record_pod(pod, deleted=deleted))
        return () if known == pod and not deleted else self._find_job(pod.job_uid, pod.namespace)

    def list_jobset_uids(self) -> frozenset[str]:
        return frozenset(jobset.uid for jobset in self._jobsets.values())

    def list_batch_job_uids(self) -> frozenset[str]:
        return frozenset(self._batch_jobs)

    def list_pod_uids(self) -> frozenset[str]:
        return frozenset(pod.uid for pod in self._pods.values())

    def forget_jobsets(self, gone: frozenset[str]) -> Iterator[ObjectKey]:
        for key in [key for key, jobset in self._jobsets.items() if jobset.uid in gone]:
            del self._jobsets[key]
            yield key

    def forget_batch_jobs(self, gone: frozenset[str]) -> Iterator[ObjectKey]:
        for uid in gone & frozenset(self._batch_jobs):
            batch_job = self._batch_jobs.pop(uid)
            self._ownership.record_batch_job(batch_job, deleted=True)
            yield from self._find_job(batch_job.job_uid, batch_job.namespace)

    def forget_pods(self, gone: frozenset[str]) -> Iterator[ObjectKey]:
        for name, pod in [(name, pod) for name, pod in self._pods.items() if pod.uid in gone]:
            self._drop_pod(name)
            self._ownership.record_pod(pod, deleted=True)
            yield from self._find_job(pod.job_uid, pod.namespace)

    def forget_jobset(self, key: ObjectKey) -> None:
        """Forget the JobSet with that key, whichever it is."""
        self._jobsets.pop(key, None)

    def get_jobset(self, key: ObjectKey) -> JobSet | None:
        return self._jobsets.get(key)

    def get_batch_job(self, uid: str) -> BatchJob | None:
        return self._batch_jobs.get(uid)

    def get_pod(self, namespace: str, name: str) -> Pod | None:
        return self._pods.get((namespace, name))

    def list_pods(self, job_uid: str) -> tuple[Pod, ...]:
        """List the job's own pods: those whose chain of owners leads to the job."""
        return tuple(self._pods[name] for name in sorted(self._pods_of.get(job_uid, ())))

    def find_jobs_on(self, node_name: str) -> frozenset[ObjectKey]:
        """Find the jobs that have pods on the node."""
        on_it = {(pod.job_uid, pod.namespace) for pod in self._pods.values() if pod.node == node_name}
        return frozenset(key for uid, namespace in on_it for key in self._find_job(uid, namespace))

    def list_leftovers(self, key: ObjectKey) -> tuple[BatchJob | Pod, ...]:
        """List Jobs that have names which the job's next JobSet will use, and live pods of such Jobs."""
        job_name = re.compile(re.escape(f"{key.name}-{WORKER_JOB}-") + r"\d+")
        batch_jobs = [
            batch_job for batch_job in self._batch_jobs.values() if job_name.fullmatch(batch_job.name)
        ]
        live = [
            pod
            for pod in self._pods.values()
            if pod.owner_name is not None and job_name.fullmatch(pod.owner_name) and not pod.terminal
        ]
        both: tuple[BatchJob | Pod, ...] = (*batch_jobs, *live)
        found = [item for item in both if item.namespace == key.namespace]
        return tuple(sorted(found, key=lambda item: (isinstance(item, Pod), item.name)))

    def _add_owned(self, own: Iterable[BatchJob | Pod]) -> None:
        for item in own:
            if isinstance(item, BatchJob):
                self.evidence.add_batch_job(item)
                continue
            self.evidence.add_pod(item)
            present = self._pods.get((item.namespace, item.name))
            if present is not None and present.uid == item.uid:
                self._pods_of[item.job_uid].add((item.namespace, item.name))

    def _drop_pod(self, name: tuple[str, str]) -> None:
        names = self._pods_of.get(job_uid := self._pods.pop(name).job_uid)
        if names is not None:
            names.discard(name)
            if not names:
                del self._pods_of[job_uid]


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
