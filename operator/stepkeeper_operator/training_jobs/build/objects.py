"""Build the ConfigMap that is mounted into every pod, and the common parts of all manifests."""

from typing import Any, Final

from stepkeeper.contract import (
    CA_FILE_NAME,
    SETTINGS_FILE_NAME,
    Endpoint,
    Hang,
    HangLimits,
    Interval,
    Retention,
    Settings,
)
from stepkeeper.contract.wire import decode
from stepkeeper_operator.api.v1alpha1.trainingjob import (
    API_VERSION,
    KIND,
    CheckpointedTrainingJob,
    HangAction,
    HangSpec,
)
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.labels import (
    JOB_NAME_LABEL,
    JOB_UID_LABEL,
    RESTART_ANNOTATION,
    STARTED_SETTINGS_ANNOTATION,
)
from stepkeeper_operator.settings import OperatorSettings

__all__ = [
    "KEPT_JOBSET",
    "TRAINER_STATUS_URL",
    "build_config_map",
    "build_settings",
    "build_stacks",
    "config_map_name",
    "job_labels",
    "owner_reference",
    "resolve_hang",
    "restart_command",
]

KEPT_JOBSET: Final = "jobset.json"
"""Key of the ConfigMap with the JobSet of the last accepted spec, which runs the job while its spec can't be read."""

TRAINER_STATUS_URL: Final = "trainer-status-url"
"""Key of the ConfigMap with the URL for the trainer's own progress. Pods have it as a variable."""


def owner_reference(job: CheckpointedTrainingJob) -> dict[str, Any]:
    """Build the reference to the job as controller of an object, so that the object is deleted with the job."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def job_labels(job: CheckpointedTrainingJob) -> dict[str, str]:
    return {JOB_UID_LABEL: job.metadata.uid, JOB_NAME_LABEL: job.metadata.name}


def config_map_name(job_name: str) -> str:
    return f"{job_name}-stepkeeper"


def restart_command(job: CheckpointedTrainingJob) -> str:
    """Return the command that asks for a restart of the job, for messages."""
    return (
        f"kubectl -n {job.metadata.namespace} annotate --overwrite ctj {job.metadata.name} "
        f"{RESTART_ANNOTATION}=<any new value>"
    )


def build_config_map(
    job: CheckpointedTrainingJob,
    settings: OperatorSettings,
    ca_pem: str,
    *,
    jobset: str | None = None,
    started: str | None = None,
) -> dict[str, Any]:
    """Build the manifest. The mount in running pods follows an edit, but they use it only at their next start.

    `jobset` is the job's JobSet as `keep_jobset` builds it. `started` has the settings that the running pods have read,
    if these differ from the job's.
    """
    kept = {} if jobset is None else {KEPT_JOBSET: jobset}
    read = {} if started is None else {STARTED_SETTINGS_ANNOTATION: started}
    own = {
        SETTINGS_FILE_NAME: build_settings(job, settings).to_json().decode(),
        CA_FILE_NAME: ca_pem,
        TRAINER_STATUS_URL: settings.trainer_status_url(job.metadata.namespace, job.metadata.name),
    }
    return _config_map(job, config_map_name(job.metadata.name), own | kept, annotations=read)


def build_stacks(job: CheckpointedTrainingJob, name: str, number: int, hang: Hang) -> dict[str, Any]:
    """Build the ConfigMap with the stacks of a hang of attempt `number`."""
    about = {"attempt": str(number), "since": render_time(hang.since_unix_s), "kind": hang.kind}
    return _config_map(job, name, about | {"text": hang.text, "stacks": hang.stacks})


def resolve_hang(job: CheckpointedTrainingJob, settings: OperatorSettings) -> HangSpec:
    """Return the job's `spec.hang`, with the operator's settings for what it leaves out."""
    given = job.spec.hang or HangSpec()
    default = HangSpec(
        after_seconds=settings.hang_after_s or None,
        startup_seconds=settings.hang_startup_s,
        action=HangAction(settings.hang_action),
        max_restarts=settings.hang_max_restarts,
    )
    return default.model_copy(update=given.model_dump(exclude_none=True, by_alias=False))


def _config_map(
    job: CheckpointedTrainingJob,
    name: str,
    data: dict[str, str],
    *,
    annotations: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            "labels": job_labels(job),
            "ownerReferences": [owner_reference(job)],
            **({"annotations": annotations} if annotations else {}),
        },
        "data": data,
    }


def build_settings(job: CheckpointedTrainingJob, settings: OperatorSettings) -> Settings:
    """Build the settings that pods read when they start."""
    checkpoint, hang = job.spec.checkpoint, resolve_hang(job, settings)
    return Settings(
        uri=checkpoint.uri,
        interval=decode(Interval, checkpoint.interval.model_dump(exclude_none=True)),
        retention=decode(Retention, checkpoint.retention.model_dump(exclude_none=True)),
        on_disruption=checkpoint.on_disruption,
        total_steps=job.spec.total_steps,
        endpoint=Endpoint(
            url=settings.report_url(job.metadata.namespace, job.metadata.name),
            report_interval_s=settings.report_interval_s,
        ),
        hang=HangLimits(
            startup_s=hang.startup_seconds or settings.hang_startup_s, after_s=hang.after_seconds
        ),
    )
