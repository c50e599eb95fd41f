"""Keep the last known objects of the cluster, and find the jobs that a change concerns."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from stepkeeper_operator.cache.evidence import EvidenceCache
from stepkeeper_operator.cache.ownership import OwnershipTracker
from stepkeeper_operator.facts import (
    BatchJob,
    JobSet,
    Node,
    Pod,
    read_batch_job,
    read_jobset,
    read_node,
    read_pod,
)
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.labels import WORKER_JOB

__all__ = ["Cache", "JobKey"]

_GONE_NODE_KEPT_S = 900


class JobKey(NamedTuple):
    """The namespace and name of a CheckpointedTrainingJob."""

    namespace: str
    name: str


class Cache:
    """Keep the last known objects.

    Watches feed it; each `record_…` returns the keys of the jobs that the change concerns.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.evidence = EvidenceCache()
        self._ownership = OwnershipTracker()
        self._training_jobs: dict[JobKey, dict[str, Any]] = {}
        self._keys: dict[str, JobKey] = {}
        self._jobsets: dict[JobKey, JobSet] = {}
        self._batch_jobs: dict[str, BatchJob] = {}
        self._pods: dict[tuple[str, str], Pod] = {}
        self._pods_of: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        self._nodes: dict[str, Node] = {}
        self.last_event_at = clock()
        """Unix time of the latest event from any watch."""

    def record_training_job(self, raw: RawObject, *, deleted: bool = False) -> tuple[JobKey, ...]:
        """Record the job unless a newer version is known: answers to our own writes arrive before the watch does."""
        meta = raw["metadata"]
        key = JobKey(meta["namespace"], meta["name"])
        known = self._training_jobs.get(key)
        if deleted:
            if known is not None and known["metadata"]["uid"] == meta["uid"]:
                del self._training_jobs[key]
            self._keys.pop(meta["uid"], None)
            self._forget_job(meta["uid"])
            return (key,)
        if known is not None and _version(known) > _version(raw):
            return ()
        slim = {name: value for name, value in meta.items() if name != "managedFields"}
        self._training_jobs[key] = {**raw, "metadata": slim}
        self._keys[meta["uid"]] = key
        self._add_owned(self._ownership.record_training_job(meta["uid"], key.namespace))
        return (key,)

    def record_jobset(self, raw: RawObject, *, deleted: bool = False) -> tuple[JobKey, ...]:
        jobset = read_jobset(raw)
        self._add_owned(self._ownership.record_jobset(jobset, deleted=deleted))
        key = JobKey(jobset.namespace, jobset.name)
        known = self._jobsets.get(key)
        if not deleted:
            self._jobsets[key] = jobset
        elif known is not None and known.uid == jobset.uid:
            del self._jobsets[key]
        return (key,)

    def record_batch_job(self, raw: RawObject, *, deleted: bool = False) -> tuple[JobKey, ...]:
        batch_job = read_batch_job(raw)
        if deleted:
            self._batch_jobs.pop(batch_job.uid, None)
        else:
            self._batch_jobs[batch_job.uid] = batch_job
        self._add_owned(self._ownership.record_batch_job(batch_job, deleted=deleted))
        return self._find_key(batch_job.job_uid, batch_job.namespace)

    def record_pod(self, raw: RawObject, *, deleted: bool = False) -> tuple[JobKey, ...]:
        pod = read_pod(raw)
        name = (pod.namespace, pod.name)
        known = self._pods.get(name)
        if not deleted:
            self._pods[name] = pod
        elif known is not None and known.uid == pod.uid:
            self._drop_pod(name)
        self._add_owned(self._ownership.record_pod(pod, deleted=deleted))
        return () if known == pod and not deleted else self._find_key(pod.job_uid, pod.namespace)

    def record_node(self, raw: RawObject, *, deleted: bool = False) -> tuple[JobKey, ...]:
        """Record the node. A deleted node is kept for a while, because its pods' causes are judged later."""
        node = read_node(raw)
        if deleted:
            node = replace(node, gone_since=self._clock())
        known = self._nodes.get(node.name)
        self._nodes[node.name] = node
        self._forget_old_nodes()
        if known == node or (known is None and not node.lost):
            return ()
        return self._find_keys_on(node.name)

    def list_uids(self, plural: str) -> frozenset[str]:
        """List the uids of all objects of a kind that are known and not known to be gone."""
        match plural:
            case "checkpointedtrainingjobs":
                return frozenset(self._keys)
            case "jobsets":
                return frozenset(jobset.uid for jobset in self._jobsets.values())
            case "jobs":
                return frozenset(self._batch_jobs)
            case "pods":
                return frozenset(pod.uid for pod in self._pods.values())
            case _:
                return frozenset(node.uid for node in self._nodes.values() if node.gone_since is None)

    def forget_objects(self, gone: frozenset[str]) -> tuple[JobKey, ...]:
        """Forget objects that no longer exist though no watch said so. Return the keys of the jobs that it concerns."""
        concerned: set[JobKey] = set()
        for uid in gone & frozenset(self._keys):
            key = self._keys.pop(uid)
            self._training_jobs.pop(key, None)
            self._forget_job(uid)
            concerned.add(key)
        for key in [key for key, jobset in self._jobsets.items() if jobset.uid in gone]:
            del self._jobsets[key]
            concerned.add(key)
        for uid in gone & frozenset(self._batch_jobs):
            batch_job = self._batch_jobs.pop(uid)
            self._ownership.record_batch_job(batch_job, deleted=True)
            concerned.update(self._find_key(batch_job.job_uid, batch_job.namespace))
        for name, pod in [(name, pod) for name, pod in self._pods.items() if pod.uid in gone]:
            self._drop_pod(name)
            self._ownership.record_pod(pod, deleted=True)
            concerned.update(self._find_key(pod.job_uid, pod.namespace))
        for node in [node for node in self._nodes.values() if node.uid in gone]:
            self._nodes[node.name] = replace(node, gone_since=self._clock())
            concerned.update(self._find_keys_on(node.name))
        return tuple(concerned)

    def record_watch_event(self) -> None:
        """Record that a watch delivered an event."""
        self.last_event_at = self._clock()

    def forget_jobset(self, key: JobKey) -> None:
        """Forget the JobSet: the API server said that there is none, before the watch did."""
        self._jobsets.pop(key, None)

    def get_training_job(self, key: JobKey) -> RawObject | None:
        return self._training_jobs.get(key)

    def list_training_job_keys(self) -> Iterator[JobKey]:
        return iter(tuple(self._training_jobs))

    def get_jobset(self, key: JobKey) -> JobSet | None:
        return self._jobsets.get(key)

    def get_batch_job(self, uid: str) -> BatchJob | None:
        return self._batch_jobs.get(uid)

    def get_pod(self, namespace: str, name: str) -> Pod | None:
        return self._pods.get((namespace, name))

    def list_pods(self, job_uid: str) -> tuple[Pod, ...]:
        """List the job's own pods: those whose chain of owners leads to the job."""
        return tuple(self._pods[name] for name in sorted(self._pods_of.get(job_uid, ())))

    def list_leftovers(self, key: JobKey) -> tuple[BatchJob | Pod, ...]:
        """List Jobs, and live pods of Jobs, that have names which the job's next JobSet will use."""
        job_name = re.compile(re.escape(f"{key.name}-{WORKER_JOB}-") + r"\d+")
        pod_name = re.compile(job_name.pattern + r"-\d+-.*")
        batch_jobs = [
            batch_job for batch_job in self._batch_jobs.values() if job_name.fullmatch(batch_job.name)
        ]
        pods = [pod for pod in self._pods.values() if pod_name.fullmatch(pod.name)]
        live = [pod for pod in pods if pod.owner_uid is not None and not pod.terminal]
        both: tuple[BatchJob | Pod, ...] = (*batch_jobs, *live)
        found = [item for item in both if item.namespace == key.namespace]
        return tuple(sorted(found, key=lambda item: (isinstance(item, Pod), item.name)))

    def get_node(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def count_nodes(self) -> tuple[int, int]:
        """Return the number of nodes, and the number of them whose kubelet has gone silent."""
        present = [node for node in self._nodes.values() if node.gone_since is None]
        return len(present), sum(node.unknown_since is not None for node in present)

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

    def _forget_job(self, uid: str) -> None:
        self.evidence.forget_job(uid)
        self._ownership.forget_job(uid)

    def _find_key(self, job_uid: str, namespace: str) -> tuple[JobKey, ...]:
        key = self._keys.get(job_uid)
        return () if key is None or key.namespace != namespace else (key,)

    def _find_keys_on(self, node_name: str) -> tuple[JobKey, ...]:
        concerned = {(pod.job_uid, pod.namespace) for pod in self._pods.values() if pod.node == node_name}
        return tuple(key for uid, namespace in concerned for key in self._find_key(uid, namespace))

    def _forget_old_nodes(self) -> None:
        limit = self._clock() - _GONE_NODE_KEPT_S
        for name in [n.name for n in self._nodes.values() if (n.gone_since or limit) < limit]:
            del self._nodes[name]


def _version(raw: RawObject) -> int:
    text = raw["metadata"].get("resourceVersion", "")
    return int(text) if text.isdecimal() else 0
