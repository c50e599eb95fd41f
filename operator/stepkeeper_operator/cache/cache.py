"""Keep the last known objects of the cluster, and find the jobs and QueuedResources that a change concerns.

A job here is a CheckpointedTrainingJob; a batch Job is one of the Kubernetes Jobs that its JobSet makes.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partialmethod
from typing import Any, Final

from stepkeeper_operator.cache.evidence import AttemptEvidence, EvidenceCache
from stepkeeper_operator.cache.keys import ObjectKey, job_key
from stepkeeper_operator.cache.objects import Change, Objects
from stepkeeper_operator.cache.roots import Roots
from stepkeeper_operator.cluster.resources import (
    BATCH_JOBS,
    JOBSETS,
    NODES,
    PODS,
    QUEUED_RESOURCES,
    TRAINING_JOBS,
    WORKLOADS,
    Resource,
)
from stepkeeper_operator.facts.checkpoint_root import JobRoot, read_job_root
from stepkeeper_operator.facts.jobset import (
    BatchJob,
    JobSet,
    Workload,
    read_batch_job,
    read_jobset,
    read_workload,
)
from stepkeeper_operator.facts.node import Node, read_node
from stepkeeper_operator.facts.pod import Pod, read_pod
from stepkeeper_operator.facts.raw import RawObject, get_nested
from stepkeeper_operator.labels import WORKER_JOB

__all__ = ["Cache"]

_GONE_NODE_KEPT_S: Final = 900
"""A deleted node is kept for a while: the causes of its pods' ends are determined later."""


class Cache:
    """Keep the last known objects.

    Watches feed it; each `record_…` returns the keys of the jobs and QueuedResources that the change concerns.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._training_jobs = Objects(_slim, self._note_training_job)
        self._queued_resources = Objects(_slim, self._note_queued_resource)
        self._jobsets = Objects(read_jobset, self._note_jobset)
        self._batch_jobs = Objects(read_batch_job, self._note_batch_job)
        self._pods = Objects(read_pod, self._note_pod)
        self._workloads = Objects(read_workload, self._note_workload)
        self._nodes = Objects(read_node, self._note_node)
        self._kinds: dict[str, Objects[Any]] = {
            TRAINING_JOBS.kind: self._training_jobs,
            QUEUED_RESOURCES.kind: self._queued_resources,
            JOBSETS.kind: self._jobsets,
            BATCH_JOBS.kind: self._batch_jobs,
            PODS.kind: self._pods,
            WORKLOADS.kind: self._workloads,
            NODES.kind: self._nodes,
        }
        self._evidence = EvidenceCache()
        self._roots = Roots()
        self._items_of: defaultdict[ObjectKey, dict[str, BatchJob | Pod]] = defaultdict(dict)
        """Batch Jobs and pods by their uids, by the job whose JobSet can have made them."""

        self._silent_nodes: set[str] = set()
        """The uids of existing nodes with a silent kubelet."""

        self._gone_nodes: dict[str, Node] = {}
        self.last_event_at = clock()
        """Unix time of the latest event from any watch."""

    def record(self, resource: Resource, raw: RawObject, *, deleted: bool = False) -> tuple[ObjectKey, ...]:
        """Record an object of any kind that the cache keeps. Return the keys that the change concerns.

        A job or QueuedResource is ignored if a newer version is known: this operator records the answers to its own
        writes, and a watch may report earlier versions after that.
        """
        objects = self._get_objects(resource.kind)
        meta = raw["metadata"]
        # A late answer may be about a deleted job whose name another one has taken.
        known = objects.find(meta["uid"]) or objects.get(meta.get("namespace"), meta["name"])
        # Only jobs and QueuedResources are kept as mappings, with their versions.
        if not deleted and isinstance(known, Mapping) and _version(known) > _version(raw):
            return ()
        return tuple(dict.fromkeys(objects.record(raw, deleted=deleted)))

    record_training_job = partialmethod(record, TRAINING_JOBS)
    record_queued_resource = partialmethod(record, QUEUED_RESOURCES)
    record_jobset = partialmethod(record, JOBSETS)
    record_batch_job = partialmethod(record, BATCH_JOBS)
    record_pod = partialmethod(record, PODS)
    record_node = partialmethod(record, NODES)

    def list_uids(self, resource: Resource) -> frozenset[str]:
        """List the uids of all objects of a kind that exist, as far as the cache knows."""
        return self._get_objects(resource.kind).uids

    def forget_objects(self, gone: frozenset[str]) -> tuple[ObjectKey, ...]:
        """Forget objects whose deletion no watch reported. Return the keys that this concerns."""
        return tuple({key for objects in self._kinds.values() for key in objects.forget(gone)})

    def record_watch_event(self) -> None:
        """Record that a watch delivered an event."""
        self.last_event_at = self._clock()

    def forget_jobset(self, key: ObjectKey) -> None:
        """Forget the JobSet: the API server answered that there is none, and the watch has not reported that yet."""
        jobset = self.get_jobset(key)
        if jobset is not None:
            self.forget_objects(frozenset({jobset.uid}))

    def list_keys(self, kind: str) -> tuple[ObjectKey, ...]:
        """List the keys of all CheckpointedTrainingJobs or QueuedResources."""
        return tuple(_key_of(kind, raw) for raw in self._get_objects(kind))

    def get_object(self, key: ObjectKey) -> RawObject | None:
        """Return the CheckpointedTrainingJob or QueuedResource with that key."""
        raw: RawObject | None = self._get_objects(key.kind).get(key.namespace, key.name)
        return raw

    def list_root_rivals(self, key: ObjectKey) -> tuple[JobRoot, ...]:
        """List the other jobs whose root is the same as this job's, inside it or around it."""
        raw = self.get_object(key)
        return () if raw is None else self._roots.list_rivals(raw["metadata"]["uid"])

    def list_jobs_on(self, key: ObjectKey) -> tuple[RawObject, ...]:
        """List the jobs that name the QueuedResource with that key, in its namespace."""
        path = ("spec", "placement", "tpu", "queuedResourceName")
        named = (raw for raw in self._training_jobs if get_nested(raw, *path) == key.name)
        return tuple(raw for raw in named if raw["metadata"]["namespace"] == key.namespace)

    def get_jobset(self, key: ObjectKey) -> JobSet | None:
        return self._jobsets.get(key.namespace, key.name)

    def get_workload(self, jobset_uid: str) -> Workload | None:
        """Return the Workload by which Kueue manages the JobSet."""
        return next((w for w in self._workloads if w.jobset_uid == jobset_uid), None)

    def get_batch_job(self, uid: str) -> BatchJob | None:
        return self._batch_jobs.find(uid)

    def get_pod(self, namespace: str, name: str) -> Pod | None:
        return self._pods.get(namespace, name)

    def list_pods(self, job_uid: str) -> tuple[Pod, ...]:
        """List the job's own pods. A label alone proves nothing: any user can set it."""
        key = self._find_key(job_uid)
        items = () if key is None else self._items_of.get(key, {}).values()
        own = [item for item in items if isinstance(item, Pod) and item.job_uid == job_uid]
        return tuple(sorted(own, key=lambda pod: pod.name))

    def list_evidence(self, job_uid: str) -> tuple[AttemptEvidence, ...]:
        """List the evidence about the attempts of the job, from its own Jobs and pods, oldest first."""
        return self._evidence.list_attempts(job_uid)

    def list_leftovers(self, key: ObjectKey) -> tuple[BatchJob | Pod, ...]:
        """List Jobs whose names the job's next JobSet will use, and live pods of such Jobs."""
        items = self._items_of.get(key, {}).values()
        found = [item for item in items if isinstance(item, BatchJob) or not item.terminal]
        return tuple(sorted(found, key=lambda item: (isinstance(item, Pod), item.name)))

    def get_node(self, name: str) -> Node | None:
        return self._nodes.get(None, name) or self._gone_nodes.get(name)

    def count_nodes(self) -> tuple[int, int]:
        """Return the number of nodes, and the number of those with a silent kubelet."""
        return len(self._nodes), len(self._silent_nodes)

    def list_nodes_of(self, queued_resource_uid: str) -> tuple[Node, ...]:
        """List the existing nodes whose labels name the QueuedResource, by name."""
        return tuple(n for n in self.list_queued_nodes() if n.queued_resource_uid == queued_resource_uid)

    def list_queued_nodes(self) -> tuple[Node, ...]:
        """List the existing nodes whose labels name any QueuedResource, by name."""
        queued = [node for node in self._nodes if node.queued_resource_uid is not None]
        return tuple(sorted(queued, key=lambda node: node.name))

    def _get_objects(self, kind: str) -> Objects[Any]:
        try:
            return self._kinds[kind]
        except KeyError:
            raise ValueError(f"the cache keeps no objects of kind {kind}") from None

    def _find_key(self, job_uid: str) -> ObjectKey | None:
        raw = self._training_jobs.find(job_uid)
        return None if raw is None else _key_of(TRAINING_JOBS.kind, raw)

    def _find_job(self, item: BatchJob | Pod) -> tuple[ObjectKey, ...]:
        key = self._find_key(item.job_uid)
        return () if key is None or key.namespace != item.namespace else (key,)

    def _note_training_job(self, change: Change[RawObject]) -> Iterator[ObjectKey]:
        key, uid = _key_of(TRAINING_JOBS.kind, change.item), change.item["metadata"]["uid"]
        self._roots.set_root(uid, None if change.deleted else read_job_root(change.item))
        if change.deleted:
            self._evidence.forget_job(uid)
        elif change.before is None:
            # Its batch Jobs and pods may be known already: until now they belonged to no known job.
            for item in self._items_of.get(key, {}).values():
                self._keep_evidence(item)
        yield key

    def _note_queued_resource(self, change: Change[RawObject]) -> Iterator[ObjectKey]:
        """Yield the keys of the QueuedResource and of the jobs in its namespace that name it."""
        key = _key_of(QUEUED_RESOURCES.kind, change.item)
        yield key
        yield from sorted(_key_of(TRAINING_JOBS.kind, raw) for raw in self.list_jobs_on(key))

    def _note_jobset(self, change: Change[JobSet]) -> Iterator[ObjectKey]:
        yield job_key(change.item.namespace, change.item.name)

    def _note_workload(self, change: Change[Workload]) -> Iterator[ObjectKey]:
        """Yield the key of the job that has the name of the Workload's JobSet."""
        workload = change.item
        if workload.jobset_uid and (change.before != workload or change.deleted):
            yield job_key(workload.namespace, workload.jobset_name)

    def _note_batch_job(self, change: Change[BatchJob]) -> Iterable[ObjectKey]:
        self._note_item(change)
        return self._find_job(change.item)

    def _note_pod(self, change: Change[Pod]) -> Iterable[ObjectKey]:
        pod = change.item
        self._note_item(change)
        unchanged = change.before == pod and not change.deleted
        return () if unchanged else self._find_job(pod)

    def _note_item(self, change: Change[Any]) -> None:
        item, before = change.item, change.before or change.item
        self._keep_evidence(item)
        # An orphaned pod has another maker than before: none.
        if (known := _find_maker(before)) is not None and (items := self._items_of.get(known)) is not None:
            items.pop(item.uid, None)
            if not items:
                del self._items_of[known]
        key = _find_maker(item)
        if key is not None and not change.deleted:
            self._items_of[key][item.uid] = item

    def _keep_evidence(self, item: BatchJob | Pod) -> None:
        """Keep the state of a known job's own batch Job or pod. Any user can set a label, and evidence is limited."""
        key = self._find_key(item.job_uid)
        if key is not None and _find_maker(item) == key:
            self._evidence.add(item)

    def _note_node(self, change: Change[Node]) -> Iterator[ObjectKey]:
        """Yield the keys of the QueuedResources that the node belongs to, and of jobs with pods on a lost node."""
        before, node, limit = change.before, change.item, self._clock() - _GONE_NODE_KEPT_S
        kept = (gone for gone in self._gone_nodes.values() if gone.name != node.name)
        self._gone_nodes = {gone.name: gone for gone in kept if (gone.gone_since or limit) >= limit}
        if change.deleted:
            node = self._gone_nodes[node.name] = replace(node, gone_since=self._clock())
        self._silent_nodes.discard(node.uid)
        if node.unknown_since is not None and not change.deleted:
            self._silent_nodes.add(node.uid)
        if node != before:
            uids = {each.queued_resource_uid for each in (before, node) if each is not None}
            found = [self._queued_resources.find(uid) for uid in uids if uid is not None]
            yield from (_key_of(QUEUED_RESOURCES.kind, raw) for raw in found if raw is not None)
        concerns_jobs = node.lost if before is None else _judged(before) != _judged(node)
        if concerns_jobs:
            yield from {key for pod in self._pods if pod.node == node.name for key in self._find_job(pod)}


def _slim(raw: RawObject) -> RawObject:
    """Leave out managedFields, which are long and which nothing reads."""
    meta = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
    return {**raw, "metadata": meta}


def _version(raw: RawObject) -> int:
    text = raw["metadata"].get("resourceVersion", "")
    return int(text) if text.isdecimal() else 0  # other versions have no known order


def _key_of(kind: str, raw: RawObject) -> ObjectKey:
    return ObjectKey(kind, raw["metadata"]["namespace"], raw["metadata"]["name"])


def _find_maker(item: BatchJob | Pod) -> ObjectKey | None:
    """Find the job whose JobSet can have made a batch Job, <job>-w-<number>, or the batch Job of a pod."""
    name = item.name if isinstance(item, BatchJob) else item.owner_name or ""
    job, _, number = name.rpartition(f"-{WORKER_JOB}-")
    return job_key(item.namespace, job) if job and number.isdecimal() else None


def _judged(node: Node) -> tuple[str, bool, float | None, float | None]:
    """Return the fields that determine the causes of pods' ends: identity, kind and loss of the node."""
    return (node.uid, node.spot, node.unknown_since, node.gone_since)
