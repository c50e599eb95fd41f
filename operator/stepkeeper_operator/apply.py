"""Apply a decision to the cluster. A reconcile writes nowhere else."""

import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, assert_never

from stepkeeper_operator.api.v1alpha1.trainingjob import API_VERSION, KIND, CheckpointedTrainingJob
from stepkeeper_operator.cache.cache import Cache, JobKey
from stepkeeper_operator.cache.memory import Memory
from stepkeeper_operator.cluster import CONFIG_MAPS, EVENTS, JOBSETS, PODS, TRAINING_JOBS, Cluster
from stepkeeper_operator.decision import (
    Action,
    ApplyConfigMap,
    CreateJobSet,
    Decision,
    DeleteJobSet,
    DeletePod,
    DeleteTrainingJob,
    GiveUpPod,
    JobEvent,
    SetSuspend,
)
from stepkeeper_operator.errors import ApiError, InvalidObjectError
from stepkeeper_operator.facts import JobSet, read_config_map
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.labels import NODE_LOST_REASON
from stepkeeper_operator.metrics import Metrics

__all__ = ["Applier", "pod_failure_patch", "status_manifest", "suspend_manifest"]

_log = logging.getLogger(__name__)

_EVENT_LIMIT = 1024


class Applier:
    """Carry out a decision in its order: status, events, actions."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        memory: Memory,
        metrics: Metrics,
        identity: str,
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._memory = memory
        self._metrics = metrics
        self._identity = identity
        self._clock = clock

    async def apply_decision(self, key: JobKey, job: CheckpointedTrainingJob, decision: Decision) -> None:
        """Carry out `decision`.

        Raises:
            ApiError: A write failed. The writes before it are done.
        """
        if decision.write_status:
            body = status_manifest(job, decision)
            raw = await self._cluster.apply(TRAINING_JOBS, key.namespace, body, subresource="status")
            self._cache.record_training_job(raw)
            self._memory.get_job(job.metadata.uid).last_write_at = self._clock()
            self._count_write("status", key)
        for event in decision.events:
            await self._create_event(key, job, event)
        for action in decision.actions:
            await self._do_action(key, job, action)

    async def _do_action(self, key: JobKey, job: CheckpointedTrainingJob, action: Action) -> None:
        match action:
            case ApplyConfigMap():
                raw = await self._cluster.apply(CONFIG_MAPS, key.namespace, action.manifest)
                self._memory.get_job(job.metadata.uid).config_map = read_config_map(raw)
            case CreateJobSet():
                await self._create_jobset(key, job, action)
            case SetSuspend():
                body = suspend_manifest(action.jobset, suspend=action.suspend)
                self._cache.record_jobset(await self._cluster.apply(JOBSETS, key.namespace, body))
            case DeleteJobSet():
                uid = action.jobset.uid
                await self._cluster.delete(JOBSETS, key.namespace, key.name, uid=uid, foreground=True)
            case DeletePod():
                pod = action.pod
                await self._cluster.delete(PODS, pod.namespace, pod.name, uid=pod.uid)
            case GiveUpPod():
                await self._give_up_pod(action)
            case DeleteTrainingJob():
                await self._cluster.delete(TRAINING_JOBS, key.namespace, key.name, uid=job.metadata.uid)
            case _:
                assert_never(action)
        self._count_write(type(action).__name__, key)

    async def _create_jobset(self, key: JobKey, job: CheckpointedTrainingJob, action: CreateJobSet) -> None:
        memory = self._memory.get_job(job.metadata.uid)
        try:
            raw = await self._cluster.create(JOBSETS, key.namespace, action.manifest)
        except InvalidObjectError as error:
            memory.rejection = (job.metadata.generation, str(error))
            raise
        memory.rejection = None
        self._cache.record_jobset(raw)

    async def _give_up_pod(self, action: GiveUpPod) -> None:
        pod = action.pod
        if not pod.terminal:
            body = pod_failure_patch(action, now=self._clock())
            try:
                await self._cluster.patch_pod_status(pod.namespace, pod.name, body)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                self._cache.forget_objects(frozenset({pod.uid}))
                return
        # The Job's finalizer keeps the pod until the Job has counted it. Without this deletion it holds up the restart.
        await self._cluster.delete(PODS, pod.namespace, pod.name, uid=pod.uid, at_once=True)

    async def _create_event(self, key: JobKey, job: CheckpointedTrainingJob, event: JobEvent) -> None:
        try:
            await self._cluster.create(EVENTS, key.namespace, self._build_event(job, event))
        except ApiError as error:
            # The status says the same, so a lost event is not worth repeating the other writes.
            _log.warning("cannot write event", extra={"job": "/".join(key), "error": str(error)})
        _log.info(event.message, extra={"job": "/".join(key), "reason": event.reason})

    def _build_event(self, job: CheckpointedTrainingJob, event: JobEvent) -> dict[str, Any]:
        meta = job.metadata
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": f"{meta.name}.{uuid.uuid4().hex[:16]}", "namespace": meta.namespace},
            "eventTime": datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": "stepkeeper.dev/operator",
            "reportingInstance": self._identity,
            "action": "Reconcile",
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "note": event.message[:_EVENT_LIMIT],
            "regarding": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
            },
        }

    def _count_write(self, what: str, key: JobKey) -> None:
        self._metrics.writes.labels(what=what).inc()
        _log.debug("wrote", extra={"what": what, "job": "/".join(key)})


def status_manifest(job: CheckpointedTrainingJob, decision: Decision) -> dict[str, Any]:
    """Build the whole status. The API server refuses it if anybody changed the job since it was read."""
    meta = job.metadata
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": meta.name,
            "namespace": meta.namespace,
            "uid": meta.uid,
            "resourceVersion": meta.resource_version,
        },
        "status": decision.status.to_raw(),
    }


def suspend_manifest(jobset: JobSet, *, suspend: bool) -> dict[str, Any]:
    """Build the change of `suspend`, the one field of a JobSet that changes after it was made."""
    return {
        "apiVersion": JOBSETS.api_version,
        "kind": JOBSETS.kind,
        "metadata": {"name": jobset.name, "namespace": jobset.namespace, "uid": jobset.uid},
        "spec": {"suspend": suspend},
    }


def pod_failure_patch(action: GiveUpPod, *, now: float) -> dict[str, Any]:
    """Build the patch that fails a pod, with phase and condition together.

    A Failed pod without the condition would count as a failure of the application.
    """
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": NODE_LOST_REASON,
        "message": action.message,
        "lastTransitionTime": render_time(now),
    }
    return {
        "metadata": {"uid": action.pod.uid},
        "status": {
            "phase": "Failed",
            "reason": NODE_LOST_REASON,
            "message": action.message,
            "conditions": [condition],
        },
    }
