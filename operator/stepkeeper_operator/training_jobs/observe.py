"""Observe the cluster around one job: from the cache, and by requests where the cache may be stale.

This is the only place where a reconcile reads.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionType, find_condition
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.keys import ObjectKey, queued_resource_key
from stepkeeper_operator.cache.reports import ReportCache
from stepkeeper_operator.cluster.resources import BATCH_JOBS, CONFIG_MAPS, JOBSETS, PODS
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts.jobset import BatchJob, ConfigMap, JobSet, read_config_map, read_jobset
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.facts.queued_resource import (
    MachinesUser,
    QueuedMachines,
    read_machines_user,
    read_queued_machines,
)
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.labels import JOB_UID_LABEL
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.training_jobs.attempts.pod_ends import was_stopped
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

_FAILED_PROBE: Final = re.compile("failed (liveness|startup) probe")
_UNHEALTHY: Final = re.compile("(Liveness|Startup) probe failed")
_CONTAINER: Final = re.compile("{(.+)}")
_EVENT_DELAY_S: Final = 5.0
"""Seconds after the end of a container until its kubelet's event is there, and between two lists of events."""


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
        uid, over, cache = job.metadata.uid, find_end(job) is not None, self.shared.cache
        memory = self.memory.get_job(uid)
        jobset = cache.get_jobset(key) if over else await self._read_jobset(key, job)
        config_map = None if over else await self._read_config_map(key, uid)
        of_deleted_job = _find_object_of_deleted_job(key, uid, jobset, config_map)
        if of_deleted_job is not None:
            jobset = config_map = None  # the garbage collector deletes them
            stopping = _find_terminating(cache.list_leftovers(key))
            of_deleted_job = replace(of_deleted_job, terminating=stopping)
        jobset = _restore_created_suspended(job, jobset, memory)
        pods, evidence = cache.list_pods(uid), cache.list_evidence(uid)
        n_nodes, n_unknown_nodes = cache.count_nodes()
        look_s = None if over else await self._read_failed_probes(key.namespace, evidence, memory)
        # A refused creation says nothing about a JobSet that is built from an edited spec.
        rejections = {
            action: rejection
            for action, rejection in memory.rejections.items()
            if rejection.reportable
            and (action != CreateJobSet.__name__ or rejection.generation == job.metadata.generation)
        }
        leftover = None
        if jobset is None and not over:  # the next JobSet has to wait for it
            leftover = of_deleted_job or await self._find_leftover(key, job)
        terminating = () if leftover is None else leftover.terminating
        return Observed(
            jobset=jobset,
            workload=None if jobset is None else cache.get_workload(jobset.uid),
            pods=pods,
            leftover=leftover,
            evidence=evidence,
            nodes=self._collect_nodes((*pods, *terminating), evidence),
            failed_probes={} if over else memory.failed_probes,
            probes_look_s=look_s,
            n_nodes=n_nodes,
            n_unknown_nodes=n_unknown_nodes,
            report=self.reports.get_report(uid),
            trainer_status=self.reports.get_trainer_status(uid),
            config_map=config_map,
            ca_pem=self.ca_pem(),
            rejection=rejections.get(CreateJobSet.__name__),
            rejections=rejections,
            has_acted=memory.has_acted,
            saved_stacks=memory.saved_stacks,
            unreadable=unreadable,
            root_rivals=cache.list_root_rivals(key),
            machines=self._read_machines(key, job),
            machines_users=self._list_machines_users(key, job),
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

    def _list_machines_users(self, key: ObjectKey, job: CheckpointedTrainingJob) -> tuple[MachinesUser, ...]:
        name = job.spec.placement.queued_resource_name
        found = (
            () if name is None else self.shared.cache.list_jobs_on(queued_resource_key(key.namespace, name))
        )
        return tuple(read_machines_user(raw) for raw in found if raw["metadata"]["name"] != key.name)

    async def _read_jobset(self, key: ObjectKey, job: CheckpointedTrainingJob) -> JobSet | None:
        """Read the JobSet from the cache, or from the API server if the cache has none, or one that is not trusted.

        A JobSet that seems to be gone ends the attempt, so its absence is confirmed. One that the job waits for is
        read again from time to time, since watches can break silently.
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
        """Find one Job or pod of an earlier JobSet. The API server has to confirm it: a stale one delays a start."""
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
            return None  # there was no earlier JobSet, or nothing starts yet
        for resource in (BATCH_JOBS, PODS):
            # List first: an object that a watch delivers meanwhile is then in the cache.
            selector, namespace = f"{JOB_UID_LABEL}={job.metadata.uid}", job.metadata.namespace
            present = await self.shared.cluster.list_uids(resource, selector, namespace=namespace)
            if present - self.shared.cache.list_uids(resource):
                return Leftover(name=f"a {resource.kind} that no watch has reported yet")
        return None

    async def _read_config_map(self, key: ObjectKey, uid: str) -> ConfigMap | None:
        """Read the ConfigMap once per resync period. ConfigMaps are not watched; each write also refreshes it.

        A ConfigMap of another owner is read each time, since it may disappear at any moment.
        """
        memory, now = self.memory.get_job(uid), self.shared.clock()
        known = memory.config_map
        unusable = known is None or known.owner_uid != uid
        if unusable or now - memory.config_map_read_at >= self.settings.resync_s:
            raw = await self.shared.cluster.get(CONFIG_MAPS, key.namespace, config_map_name(key.name))
            memory.config_map_read_at = now
            memory.config_map = None if raw is None else read_config_map(raw)
        return memory.config_map

    async def _read_failed_probes(
        self, namespace: str, evidence: tuple[AttemptEvidence, ...], memory: JobMemory
    ) -> float | None:
        """Read from events which pods their kubelets ended for a failed probe: the pods' own status lacks it.

        They are read if a pod with a probe has ended for no other known reason, and again for those that come late:
        after the seconds that are returned, if not None.
        """
        now, known = self.shared.clock(), memory.failed_probes
        pods = [pod for attempt in evidence for pod in _list_perhaps_not_alive(attempt)]
        if all(pod.uid in known for pod in pods):
            return None
        if now >= memory.probes_read_at + _EVENT_DELAY_S:
            memory.probes_read_at = now
            found = known | await self._list_failed_probes(namespace)
            memory.failed_probes = known = {
                pod.uid: found.get(pod.uid, "")
                for pod in pods
                if pod.uid in found or now >= (pod.finished_at or 0.0) + _EVENT_DELAY_S
            }
        if all(pod.uid in known for pod in pods):
            return None
        return memory.probes_read_at + _EVENT_DELAY_S - now

    async def _list_failed_probes(self, namespace: str) -> dict[str, str]:
        """List the container and the probe that kubelets name in their events, by the pod's uid."""
        try:
            killed = await self._list_events(namespace, "Killing")
            found = {uid: note for uid, note, _ in killed if _FAILED_PROBE.search(note)}
            stopped = {(uid, note) for uid, note, _ in killed if uid not in found}
            unhealthy = await self._list_events(namespace, "Unhealthy") if stopped else []
        except ApiError as error:
            if not error.is_permanent:
                raise
            return {}  # the operator may list no events: only the name of the probe is missing
        # A kubelet that stops a pod's only container names no probe there.
        for uid, note, path in unhealthy:
            probe, container = _UNHEALTHY.match(note), _CONTAINER.search(path)
            if probe and container and (uid, f"Stopping container {container[1]}") in stopped:
                found[uid] = f"Container {container[1]} failed {probe[1].lower()} probe"
        return found

    async def _list_events(self, namespace: str, reason: str) -> list[tuple[str, str, str]]:
        """List the pod's uid, the note, and the path of the container in the pod's spec."""
        events = await self.shared.cluster.list_events(namespace, reason=reason)
        abouts = [(event.get("regarding") or {}, str(event.get("note"))) for event in events]
        return [(str(about.get("uid")), note, str(about.get("fieldPath"))) for about, note in abouts]

    def _collect_nodes(self, pods: tuple[Pod, ...], evidence: tuple[AttemptEvidence, ...]) -> dict[str, Node]:
        names = {pod.node for pod in pods} | {pod.node for attempt in evidence for pod in attempt.pods}
        found = {name: self.shared.cache.get_node(name) for name in names if name is not None}
        return {name: node for name, node in found.items() if node is not None}


def _list_perhaps_not_alive(evidence: AttemptEvidence) -> list[Pod]:
    """List the ended pods of an attempt that have a probe which may have ended them."""
    if any(pod.disruption is not None or pod.hang for pod in evidence.pods):
        return []
    return [
        pod
        for pod in evidence.pods
        if pod.probed
        and (pod.code not in {None, ExitCode.DONE} or pod.other_failure is not None)
        and not was_stopped(pod)
    ]


def _restore_created_suspended(
    job: CheckpointedTrainingJob, jobset: JobSet | None, memory: JobMemory
) -> JobSet | None:
    """Set `created_suspended`: whether something other than this operator suspended the JobSet at its creation.

    Memory has this, or the status that an earlier operator process wrote: QuotaReserved with reason NoWorkload.
    """
    if jobset is None:
        return None
    memory.note_foreign_suspension(jobset)
    if jobset.is_queued:
        return jobset  # it shows by itself that Kueue manages it
    resources = job.status.resources
    same = resources is not None and resources.job_set is not None and resources.job_set.uid == jobset.uid
    quota = find_condition(job.status.conditions, ConditionType.QUOTA_RESERVED)
    recorded = same and quota is not None and quota.reason == Reason.NO_WORKLOAD
    return replace(jobset, created_suspended=recorded or memory.foreign_suspended_jobset == jobset.uid)


def _find_terminating(items: tuple[BatchJob | Pod, ...]) -> tuple[Pod, ...]:
    """Find the pods of training jobs whose deletion was requested."""
    pods = [item for item in items if isinstance(item, Pod)]
    return tuple(pod for pod in pods if pod.deletion_requested_at is not None and pod.job_uid)


def _find_object_of_deleted_job(
    key: ObjectKey, uid: str, jobset: JobSet | None, config_map: ConfigMap | None
) -> Leftover | None:
    """Find an object of a deleted job of the same name that is not garbage-collected yet."""
    kinds = {JOBSETS.kind: (jobset, key.name), CONFIG_MAPS.kind: (config_map, config_map_name(key.name))}
    for kind, (item, name) in kinds.items():
        if item is not None and item.owner_uid != uid and item.owner_job == key.name:
            return Leftover(name=f"{kind} {name}", origin="a deleted job of this name")
    return None
