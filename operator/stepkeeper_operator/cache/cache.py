"""Keep the last known objects of the cluster, and find the jobs and QueuedResources that a change concerns."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from stepkeeper_operator.cache.evidence import EvidenceCache
from stepkeeper_operator.cache.job_indexes import JobRoots, QueuedResourceJobs
from stepkeeper_operator.cache.job_objects import JobObjects, Workloads
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cache.nodes import NodeCache, NodeChange
from stepkeeper_operator.cache.raw_objects import RawObjects
from stepkeeper_operator.cluster import (
    BATCH_JOBS,
    JOBSETS,
    NODES,
    PODS,
    QUEUED_RESOURCES,
    TRAINING_JOBS,
    WORKLOADS,
    Resource,
)
from stepkeeper_operator.facts import BatchJob, JobRoot, JobSet, Node, Pod, Workload
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["Cache"]


class _RecordObject(Protocol):
    def __call__(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The ways to keep the objects of one kind."""

    record: _RecordObject
    list_uids: Callable[[], frozenset[str]]
    forget: Callable[[frozenset[str]], Iterator[ObjectKey]]


class Cache:
    """Keep the last known objects.

    Watches feed it; each `record_…` returns the keys of the jobs and QueuedResources that the change concerns.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._training_jobs = RawObjects(TRAINING_JOBS.kind)
        self._queued_resources = RawObjects(QUEUED_RESOURCES.kind)
        self._queued_resource_jobs = QueuedResourceJobs()
        self._job_roots = JobRoots()
        self._job_objects = JobObjects(self._find_job)
        self._nodes = NodeCache(clock)
        self._workloads = Workloads()
        self._kinds = self._make_kinds()
        self.last_event_at = clock()
        """Unix time of the latest event from any watch."""

    @property
    def evidence(self) -> EvidenceCache:
        return self._job_objects.evidence

    def record(self, resource: Resource, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        """Record an object of any kind that the cache keeps."""
        return self._get_kind(resource).record(raw, deleted=deleted)

    def record_training_job(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        """Record the job unless a newer version is known: answers to our own writes arrive before the watch does."""
        uid = raw["metadata"]["uid"]
        key = self._training_jobs.drop(raw) if deleted else self._training_jobs.record(raw)
        if key is None:
            return ()
        self._index_job(key)
        if deleted:
            self._job_objects.forget_job(uid)
        else:
            self._job_objects.add_job(uid, key.namespace)
        return (key,)

    def record_queued_resource(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        """Record the QueuedResource unless a newer version is known. It also concerns the jobs that name it."""
        key = self._queued_resources.drop(raw) if deleted else self._queued_resources.record(raw)
        return () if key is None else (key, *self._queued_resource_jobs.list_jobs(key))

    def record_jobset(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        return self._job_objects.record_jobset(raw, deleted=deleted)

    def record_batch_job(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        return self._job_objects.record_batch_job(raw, deleted=deleted)

    def record_pod(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        return self._job_objects.record_pod(raw, deleted=deleted)

    def record_node(self, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        """Record the node. It concerns the QueuedResource that it is of, and its loss the jobs with pods on it."""
        return tuple(self._find_keys_by_node(self._nodes.record(raw, deleted=deleted)))

    def list_uids(self, resource: Resource) -> frozenset[str]:
        """List the uids of all objects of a kind that are known and not known to be gone."""
        return self._get_kind(resource).list_uids()

    def forget_objects(self, gone: frozenset[str]) -> tuple[ObjectKey, ...]:
        """Forget objects that no longer exist though no watch said so. Return the keys of what it concerns."""
        return tuple({key for kind in self._kinds.values() for key in kind.forget(gone)})

    def record_watch_event(self) -> None:
        """Record that a watch delivered an event."""
        self.last_event_at = self._clock()

    def forget_jobset(self, key: ObjectKey) -> None:
        """Forget the JobSet: the API server said that there is none, before the watch did."""
        self._job_objects.forget_jobset(key)

    def knows(self, key: ObjectKey) -> bool:
        """Return True if the object with that key exists, as far as the cache knows."""
        return self._get_raw_objects(key.kind).get(key) is not None

    def list_keys(self, kind: str) -> tuple[ObjectKey, ...]:
        """List the keys of all CheckpointedTrainingJobs or QueuedResources."""
        return self._get_raw_objects(kind).list_keys()

    def get_training_job(self, key: ObjectKey) -> RawObject | None:
        return self._training_jobs.get(key)

    def get_queued_resource(self, key: ObjectKey) -> RawObject | None:
        return self._queued_resources.get(key)

    def list_root_rivals(self, key: ObjectKey) -> tuple[JobRoot, ...]:
        """List the other jobs whose root is this job's, is inside of it or around it."""
        return self._job_roots.list_rivals(key)

    def get_jobset(self, key: ObjectKey) -> JobSet | None:
        return self._job_objects.get_jobset(key)

    def get_workload(self, jobset_uid: str) -> Workload | None:
        """Return the Workload by which Kueue manages the JobSet."""
        return self._workloads.get(jobset_uid)

    def get_batch_job(self, uid: str) -> BatchJob | None:
        return self._job_objects.get_batch_job(uid)

    def get_pod(self, namespace: str, name: str) -> Pod | None:
        return self._job_objects.get_pod(namespace, name)

    def list_pods(self, job_uid: str) -> tuple[Pod, ...]:
        """List the job's own pods: those whose chain of owners leads to the job."""
        return self._job_objects.list_pods(job_uid)

    def list_leftovers(self, key: ObjectKey) -> tuple[BatchJob | Pod, ...]:
        """List Jobs that have names which the job's next JobSet will use, and live pods of such Jobs."""
        return self._job_objects.list_leftovers(key)

    def get_node(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def count_nodes(self) -> tuple[int, int]:
        """Return the number of nodes, and the number of them whose kubelet has gone silent."""
        return self._nodes.count()

    def list_nodes_of(self, queued_resource_uid: str) -> tuple[Node, ...]:
        """List the nodes that exist and whose labels name the QueuedResource, by name."""
        return self._nodes.list_nodes_of(queued_resource_uid)

    def list_queued_nodes(self) -> tuple[Node, ...]:
        """List the present nodes whose labels name any QueuedResource, by name."""
        return self._nodes.list_queued_nodes()

    def _make_kinds(self) -> dict[str, _Kind]:
        jobs, own, nodes = self._training_jobs, self._job_objects, self._nodes
        queued, workloads = self._queued_resources, self._workloads
        table = (
            (TRAINING_JOBS, self.record_training_job, jobs.list_uids, self._forget_training_jobs),
            (QUEUED_RESOURCES, self.record_queued_resource, queued.list_uids, self._forget_queued_resources),
            (JOBSETS, self.record_jobset, own.list_jobset_uids, own.forget_jobsets),
            (BATCH_JOBS, self.record_batch_job, own.list_batch_job_uids, own.forget_batch_jobs),
            (PODS, self.record_pod, own.list_pod_uids, own.forget_pods),
            (WORKLOADS, workloads.record, workloads.list_uids, workloads.forget),
            (NODES, self.record_node, nodes.list_uids, self._forget_nodes),
        )
        return {
            resource.kind: _Kind(record=record, list_uids=list_uids, forget=forget)
            for resource, record, list_uids, forget in table
        }

    def _get_kind(self, resource: Resource) -> _Kind:
        try:
            return self._kinds[resource.kind]
        except KeyError:
            raise ValueError(f"the cache keeps no objects of kind {resource.kind}") from None

    def _get_raw_objects(self, kind: str) -> RawObjects:
        for objects in (self._training_jobs, self._queued_resources):
            if objects.kind == kind:
                return objects
        raise ValueError(f"no objects of kind {kind} are reconciled")

    def _find_job(self, uid: str, namespace: str) -> tuple[ObjectKey, ...]:
        key = self._training_jobs.find_key(uid)
        return () if key is None or key.namespace != namespace else (key,)

    def _find_keys_by_node(self, change: NodeChange) -> frozenset[ObjectKey]:
        found = (self._queued_resources.find_key(uid) for uid in change.queued_resource_uids)
        owners = frozenset(key for key in found if key is not None)
        return owners | self._job_objects.find_jobs_on(change.after.name) if change.concerns_jobs else owners

    def _index_job(self, key: ObjectKey) -> None:
        raw = self._training_jobs.get(key)
        self._queued_resource_jobs.update(key, raw)
        self._job_roots.update(key, raw)

    def _forget_training_jobs(self, gone: frozenset[str]) -> Iterator[ObjectKey]:
        for uid in gone:
            key = self._training_jobs.forget(uid)
            if key is not None:
                self._index_job(key)
                self._job_objects.forget_job(uid)
                yield key

    def _forget_queued_resources(self, gone: frozenset[str]) -> Iterator[ObjectKey]:
        for uid in gone:
            key = self._queued_resources.forget(uid)
            if key is not None:
                yield from (key, *self._queued_resource_jobs.list_jobs(key))

    def _forget_nodes(self, gone: frozenset[str]) -> Iterator[ObjectKey]:
        for change in self._nodes.forget(gone):
            yield from self._find_keys_by_node(change)
