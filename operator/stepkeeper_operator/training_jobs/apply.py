"""Apply a decision about a job to the cluster. A reconcile writes nowhere else."""

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, assert_never

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cache.memory import Memory, Rejection
from stepkeeper_operator.cluster import CONFIG_MAPS, JOBSETS, PODS, TRAINING_JOBS, Cluster
from stepkeeper_operator.decision import (
    Action,
    ApplyConfigMap,
    CreateJobSet,
    Decision,
    DeleteJobSet,
    DeletePod,
    DeleteTrainingJob,
    GiveUpPod,
    SetSuspend,
)
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts import JobSet, read_config_map
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.labels import NODE_LOST_REASON
from stepkeeper_operator.writing import ObjectWriter

__all__ = ["Applier", "pod_failure_patch", "suspend_manifest"]


_log = logging.getLogger(__name__)

_REFUSALS: Final = {HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY}
"""Answers that the same JobSet gets again: validation, admission, a quota, missing permissions."""


class Applier:
    """Carry out a decision in its order: status, events, actions."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        memory: Memory,
        writer: ObjectWriter,
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._memory = memory
        self._writer = writer
        self._clock = clock

    async def apply_decision(self, key: ObjectKey, job: CheckpointedTrainingJob, decision: Decision) -> bool:
        """Carry out `decision`. Return False if the API server refused the JobSet, which the status is to say.

        Raises:
            ApiError: A write failed. The writes before it are done.
        """
        if decision.write_status:
            raw = await self._writer.write_status(job.metadata, decision.status.to_raw())
            self._cache.record_training_job(raw)
            self._memory.get_job(job.metadata.uid).last_write_at = self._clock()
        for event in decision.events:
            await self._writer.create_event(job.metadata, event)
        memory = self._memory.get_job(job.metadata.uid)
        before = memory.rejection
        for action in decision.actions:
            await self._do_action(key, job, action)
        return memory.rejection is None or memory.rejection is before

    async def _do_action(self, key: ObjectKey, job: CheckpointedTrainingJob, action: Action) -> None:
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
        self._writer.count_write(type(action).__name__, job.metadata)

    async def _create_jobset(
        self, key: ObjectKey, job: CheckpointedTrainingJob, action: CreateJobSet
    ) -> None:
        memory = self._memory.get_job(job.metadata.uid)
        try:
            raw = await self._cluster.create(JOBSETS, key.namespace, action.manifest)
        except ApiError as error:
            if error.status not in _REFUSALS:
                raise
            _log.warning("the JobSet was refused", extra={**key.log_fields, "error": str(error)})
            memory.rejection = Rejection(
                generation=job.metadata.generation,
                status=error.status,
                message=str(error),
                at=self._clock(),
            )
            return
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
