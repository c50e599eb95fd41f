"""Apply a decision about a job to the cluster. This is the only place where a reconcile writes."""

import logging
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, assert_never

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cluster.resources import CONFIG_MAPS, JOBSETS, PODS, TRAINING_JOBS
from stepkeeper_operator.errors import ApiError, ConflictError
from stepkeeper_operator.facts.jobset import JobSet, read_config_map, read_jobset
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.kinds.decision import ObjectEvent
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.kinds.writing import ObjectWriter
from stepkeeper_operator.labels import NODE_LOST_REASON
from stepkeeper_operator.training_jobs.decide.acceptance import is_refused
from stepkeeper_operator.training_jobs.decision import (
    RELYING_ON_STATUS,
    Action,
    ApplyConfigMap,
    CreateJobSet,
    Decision,
    DeleteJobSet,
    DeleteTrainingJob,
    GiveUpPod,
    SetSuspend,
)
from stepkeeper_operator.training_jobs.observed import Memory, Rejection

__all__ = ["Applier", "Outcome", "suspend_manifest"]


_log = logging.getLogger(__name__)

_NUMBER: Final = re.compile(r"\d+")
_OUTAGE_S: Final = 60.0
"""Seconds after which a failure that may be transient is reported. A webhook that restarts is not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of applying a decision."""

    status_written: bool
    """True if the status in the cluster is the decided one."""

    failures: tuple[ApiError, ...]
    """Errors of the writes to retry with back-off."""

    settled: bool
    """False if the refusals of writes may have changed, so that the status has to be derived again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applier:
    """Apply a decision in this order: status, events, actions."""

    shared: Shared
    memory: Memory
    writer: ObjectWriter

    async def apply_decision(
        self, key: ObjectKey, job: CheckpointedTrainingJob, decision: Decision
    ) -> Outcome:
        """Apply `decision`. A failed write blocks only the writes that rely on it.

        Raises ConflictError or ApiError if the job has changed or is gone; then nothing is done.
        """
        memory, creation = self.memory.get_job(job.metadata.uid), CreateJobSet.__name__
        before, unwritten = memory.rejections, await self._write_status(job, decision)
        failures = [] if unwritten is None else [unwritten]
        blocked: tuple[type[Action], ...] = () if unwritten is None else RELYING_ON_STATUS
        resources, refused = decision.status.resources, dict[str, Rejection]()
        if creation in before and (resources is None or resources.job_set is None):
            # The creation is retried only from time to time: until then its refusal counts.
            refused[creation] = before[creation]
        config_failed = False
        for action in decision.actions:
            name = type(action).__name__
            starts_pods = name == creation or (isinstance(action, SetSuspend) and not action.suspend)
            if isinstance(action, blocked) or (config_failed and starts_pods):
                continue  # pods read the ConfigMap when they start
            if name == creation:
                refused.pop(creation, None)
            error = await self._try_action(key, job, action)
            if error is None:
                continue
            rejection = self._describe_refusal(job, before.get(name), error)
            if rejection is not None:
                refused[name] = rejection
            if name == creation and rejection is not None and rejection.reportable:
                continue  # the decision sets when to retry it
            failures.append(error)
            config_failed = config_failed or isinstance(action, ApplyConfigMap)
        memory.rejections = refused
        # A status that shows the refusals of an earlier process is derived again once this one has tried the writes.
        settled = refused == before and (memory.has_acted or not is_refused(decision.status))
        memory.has_acted = True
        return Outcome(status_written=unwritten is None, failures=tuple(failures), settled=settled)

    async def _try_action(
        self, key: ObjectKey, job: CheckpointedTrainingJob, action: Action
    ) -> ApiError | None:
        try:
            await self._do_action(key, job, action)
        except ApiError as error:
            extra = {**key.log_fields, "what": type(action).__name__, "error": str(error)}
            stale = error.status == HTTPStatus.CONFLICT
            _log.log(logging.DEBUG if stale else logging.WARNING, "a write failed", extra=extra)
            return error
        return None

    async def _write_status(self, job: CheckpointedTrainingJob, decision: Decision) -> ApiError | None:
        """Write the status and then the events. Return the error, also reported as an event, if the write fails."""
        memory = self.memory.get_job(job.metadata.uid)
        if not decision.write_status:
            memory.unwritten = None  # the last status was written, or is obsolete
            return None
        try:
            raw = await self.writer.write_status(job.metadata, decision.status)
        except ApiError as error:
            if isinstance(error, ConflictError) or error.status == HTTPStatus.NOT_FOUND:
                raise  # the job has changed or is gone
            earlier = memory.unwritten
            refusal = memory.unwritten = self._describe_refusal(job, earlier, error)
            reported = earlier is not None and earlier.reportable
            if refusal is not None and refusal.reportable and not reported:
                text = f"cannot write the status; nothing starts or stops until it is written: {error}"
                event = ObjectEvent(warning=True, reason="StatusNotWritten", message=text)
                await self.writer.create_event(job.metadata, event)
            return error
        memory.unwritten = None
        self.shared.cache.record_training_job(raw)
        memory.last_write_at = self.shared.clock()
        for event in decision.events:
            await self.writer.create_event(job.metadata, event)
        return None

    def _describe_refusal(
        self, job: CheckpointedTrainingJob, earlier: Rejection | None, error: ApiError
    ) -> Rejection | None:
        """Describe the refusal of a write that may have been refused `earlier`; None for a conflict with a change."""
        if error.status == HTTPStatus.CONFLICT:
            return None
        now, generation = self.shared.clock(), job.metadata.generation
        since = now if earlier is None else earlier.since
        is_permanent = error.is_permanent and error.status < HTTPStatus.INTERNAL_SERVER_ERROR
        return Rejection(
            generation=generation,
            status=error.status,
            message=_keep_message(earlier, str(error), generation),
            at=now,
            since=since,
            reportable=is_permanent or now - since >= _OUTAGE_S,
        )

    async def _do_action(self, key: ObjectKey, job: CheckpointedTrainingJob, action: Action) -> None:
        match action:
            case ApplyConfigMap():
                raw = await self.shared.cluster.apply(CONFIG_MAPS, key.namespace, action.manifest)
                self.memory.get_job(job.metadata.uid).config_map = read_config_map(raw)
            case CreateJobSet():
                raw = await self.shared.cluster.create(JOBSETS, key.namespace, action.manifest)
                self.memory.get_job(job.metadata.uid).note_foreign_suspension(read_jobset(raw))
                self.shared.cache.record_jobset(raw)
            case SetSuspend():
                body = suspend_manifest(action.jobset, suspend=action.suspend)
                self.shared.cache.record_jobset(await self.shared.cluster.apply(JOBSETS, key.namespace, body))
            case DeleteJobSet():
                uid = action.jobset.uid
                await self.shared.cluster.delete(JOBSETS, key.namespace, key.name, uid=uid, foreground=True)
            case GiveUpPod():
                await self._give_up_pod(action)
            case DeleteTrainingJob():
                await self.shared.cluster.delete(TRAINING_JOBS, key.namespace, key.name, uid=job.metadata.uid)
            case _:
                assert_never(action)
        self.writer.count_write(type(action).__name__, job.metadata)

    async def _give_up_pod(self, action: GiveUpPod) -> None:
        pod = action.pod
        if not pod.terminal:
            body = _pod_failure_patch(action, now=self.shared.clock())
            try:
                await self.shared.cluster.patch_pod_status(pod.namespace, pod.name, body)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                self.shared.cache.forget_objects(frozenset({pod.uid}))
                return
        # JobSet restarts nothing while the pod exists. Its finalizer keeps it until its Job has counted the failure.
        await self.shared.cluster.delete(PODS, pod.namespace, pod.name, uid=pod.uid, at_once=True)


def _keep_message(earlier: Rejection | None, text: str, generation: int) -> str:
    """Return the earlier message if only numbers such as ports differ, which saves writes of the status."""
    if earlier is None or earlier.generation != generation:
        return text  # after an edit of the spec, a number may be what matters
    return earlier.message if _NUMBER.sub("", earlier.message) == _NUMBER.sub("", text) else text


def suspend_manifest(jobset: JobSet, *, suspend: bool) -> dict[str, Any]:
    """Build the change of `suspend`, the only field of a JobSet that changes after its creation."""
    return {
        "apiVersion": JOBSETS.api_version,
        "kind": JOBSETS.kind,
        "metadata": {"name": jobset.name, "namespace": jobset.namespace, "uid": jobset.uid},
        "spec": {"suspend": suspend},
    }


def _pod_failure_patch(action: GiveUpPod, *, now: float) -> dict[str, Any]:
    """Set a pod's phase and condition together: a Failed pod without it counts as the application's failure."""
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
