"""Observe the cluster around one job: from the cache, and by requests where the cache may be stale.

This is the only place where a reconcile reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from stepkeeper_operator.api.v1alpha1.conditions import ConditionType
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.keys import ObjectKey, queued_resource_key
from stepkeeper_operator.cache.reports import ReportCache
from stepkeeper_operator.cluster.resources import BATCH_JOBS, CONFIG_MAPS, JOBSETS, PODS
from stepkeeper_operator.facts.jobset import BatchJob, ConfigMap, JobSet, read_config_map, read_jobset
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.facts.queued_resource import QueuedMachines, read_queued_machines
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.labels import JOB_UID_LABEL
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.training_jobs.build.objects import config_map_name
from stepkeeper_operator.training_jobs.decision import CreateJobSet
from stepkeeper_operator.training_jobs.observed import (
    JobMemory,
    Leftover,
    Memory,
    Observed,
    compute_recheck_s,
    find_end,
)

__all__ = ["Observer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Gather the `Observed` of a job."""

    shared: Shared
    reports: ReportCache
    memory: Memory
    ca_pem: Callable[[], str]
    settings: OperatorSettings

    async def observe(
        self, key: ObjectKey, job: CheckpointedTrainingJob, unreadable: tuple[str, ...]
    ) -> Observed:
        """Gather everything around the job, whose spec lacks its `unreadable` parts. Raises ApiError.

        A job that has ended starts nothing, so the cache is enough for it.
        """
        uid, over = job.metadata.uid, find_end(job) is not None
        jobset = self.shared.cache.get_jobset(key) if over else await self._read_jobset(key, job)
        config_map = None if over else await self._read_config_map(key, uid)
        predecessors = _find_predecessors(key, uid, jobset, config_map)
        if predecessors is not None:
            # The garbage collector deletes the objects of another owner: treat them as gone.
            jobset = config_map = None
            terminating = _find_terminating(self.shared.cache.list_leftovers(key))
            predecessors = replace(predecessors, terminating=terminating)
        jobset = _recall_holder(job, jobset, self.memory.get_job(uid))
        pods, evidence = self.shared.cache.list_pods(uid), self.shared.cache.list_evidence(uid)
        n_nodes, n_unknown_nodes = self.shared.cache.count_nodes()
        memory = self.memory.get_job(uid)
        rejections = {
            action: rejection
            for action, rejection in memory.rejections.items()
            if rejection.reportable
            and (action != CreateJobSet.__name__ or rejection.generation == job.metadata.generation)
        }
        needed = not over and jobset is None
        leftover = predecessors or await self._find_leftover(key, job) if needed else None
        terminating = () if leftover is None else leftover.terminating
        return Observed(
            jobset=jobset,
            workload=None if jobset is None else self.shared.cache.get_workload(jobset.uid),
            pods=pods,
            leftover=leftover,
            evidence=evidence,
            nodes=self._collect_nodes((*pods, *terminating), evidence),
            n_nodes=n_nodes,
            n_unknown_nodes=n_unknown_nodes,
            report=self.reports.get_report(uid),
            config_map=config_map,
            ca_pem=self.ca_pem(),
            rejection=rejections.get(CreateJobSet.__name__),
            rejections=rejections,
            has_acted=memory.has_acted,
            unreadable=unreadable,
            root_rivals=self.shared.cache.list_root_rivals(key),
            machines=self._read_machines(key, job),
            queued_resources_managed=self.settings.cloud_tpu_enabled,
            operator_started_at=self.memory.started_at,
            last_write_at=memory.last_write_at,
        )

    def _read_machines(self, key: ObjectKey, job: CheckpointedTrainingJob) -> QueuedMachines | None:
        name = job.spec.placement.queued_resource_name
        if name is None:
            return None
        raw = self.shared.cache.get_object(queued_resource_key(key.namespace, name))
        return None if raw is None else read_queued_machines(raw)

    async def _read_jobset(self, key: ObjectKey, job: CheckpointedTrainingJob) -> JobSet | None:
        """Read the JobSet from the cache. If it is not cached, ask the API server, since much depends on it.

        Also ask if a job without a running attempt waits for its JobSet: watches can break silently.
        """
        known, memory = self.shared.cache.get_jobset(key), self.memory.get_job(job.metadata.uid)
        now = self.shared.clock()
        if known is not None:
            trusted_s = compute_recheck_s(job, known, now=now)
            if trusted_s is None or now - memory.jobset_read_at < trusted_s:
                return known
        raw = await self.shared.cluster.get(JOBSETS, key.namespace, key.name)
        memory.jobset_read_at = now
        if raw is None:
            self.shared.cache.forget_jobset(key)
            return None
        return read_jobset(raw)

    async def _find_leftover(self, key: ObjectKey, job: CheckpointedTrainingJob) -> Leftover | None:
        """Find one Job or pod of an earlier JobSet. The API server has to confirm it, since much depends on it."""
        items = self.shared.cache.list_leftovers(key)
        for item in items:
            resource = BATCH_JOBS if isinstance(item, BatchJob) else PODS
            raw = await self.shared.cluster.get(resource, item.namespace, item.name)
            if raw is None or raw["metadata"]["uid"] != item.uid:
                self.shared.cache.forget_objects(frozenset({item.uid}))
                continue
            return Leftover(name=f"{resource.kind} {item.name}", terminating=_find_terminating(items))
        return await self._find_unwatched(job)

    async def _find_unwatched(self, job: CheckpointedTrainingJob) -> Leftover | None:
        """Find an object of an earlier JobSet that is not in the cache yet, because the watches were broken."""
        at = job.status.next_start_time
        if job.status.operator.job_sets == 0 or (at is not None and self.shared.clock() < at):
            return None
        for resource in (BATCH_JOBS, PODS):
            # List first: an object that a watch delivers meanwhile is then in the cache.
            selector = f"{JOB_UID_LABEL}={job.metadata.uid}"
            present = await self.shared.cluster.list_uids(
                resource, selector, namespace=job.metadata.namespace
            )
            if present - self.shared.cache.list_uids(resource):
                return Leftover(name=f"a {resource.kind} that no watch has reported yet")
        return None

    async def _read_config_map(self, key: ObjectKey, uid: str) -> ConfigMap | None:
        """Read the ConfigMap once per resync period. ConfigMaps are not watched; each write also refreshes it.

        A ConfigMap of another owner is read each time, since it may disappear at any moment.
        """
        memory, now = self.memory.get_job(uid), self.shared.clock()
        known = memory.config_map
        stale = known is None or known.owner_uid != uid
        if stale or now - memory.config_map_read_at >= self.settings.resync_s:
            raw = await self.shared.cluster.get(CONFIG_MAPS, key.namespace, config_map_name(key.name))
            memory.config_map_read_at = now
            memory.config_map = None if raw is None else read_config_map(raw)
        return memory.config_map

    def _collect_nodes(self, pods: tuple[Pod, ...], evidence: tuple[AttemptEvidence, ...]) -> dict[str, Node]:
        names = {pod.node for pod in pods} | {pod.node for attempt in evidence for pod in attempt.pods}
        found = {name: self.shared.cache.get_node(name) for name in names if name is not None}
        return {name: node for name, node in found.items() if node is not None}


def _recall_holder(job: CheckpointedTrainingJob, jobset: JobSet | None, memory: JobMemory) -> JobSet | None:
    """Set `born_suspended` from memory, or from the status that an earlier operator process wrote."""
    if jobset is not None:
        memory.note_holder(jobset)
    if jobset is None or jobset.is_queued:
        return jobset
    resources = job.status.resources
    same = resources is not None and resources.job_set is not None and resources.job_set.uid == jobset.uid
    kind = ConditionType.QUOTA_RESERVED
    recorded = same and any(c.type == kind and c.reason == Reason.NO_WORKLOAD for c in job.status.conditions)
    return replace(jobset, created_suspended=recorded or memory.held_jobset == jobset.uid)


def _find_terminating(items: tuple[BatchJob | Pod, ...]) -> tuple[Pod, ...]:
    """Find the pods of training jobs whose deletion was requested."""
    pods = [item for item in items if isinstance(item, Pod)]
    return tuple(pod for pod in pods if pod.deadline is not None and pod.job_uid)


def _find_predecessors(
    key: ObjectKey, uid: str, jobset: JobSet | None, config_map: ConfigMap | None
) -> Leftover | None:
    """Find an object of a deleted job of the same name that is not garbage-collected yet."""
    kinds = {JOBSETS.kind: (jobset, key.name), CONFIG_MAPS.kind: (config_map, config_map_name(key.name))}
    for kind, (item, name) in kinds.items():
        if item is not None and item.owner_uid != uid and item.owner_job == key.name:
            return Leftover(name=f"{kind} {name}", origin="a deleted job of this name")
    return None
