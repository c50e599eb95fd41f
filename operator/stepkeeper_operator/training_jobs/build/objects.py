"""Build the ConfigMap that is mounted into every pod, and the common parts of all manifests."""

from typing import Any, Final

from stepkeeper.contract import CA_FILE_NAME, SETTINGS_FILE_NAME, Endpoint, Interval, Retention, Settings
from stepkeeper.contract.wire import decode
from stepkeeper_operator.api.v1alpha1.trainingjob import API_VERSION, KIND, CheckpointedTrainingJob
from stepkeeper_operator.labels import JOB_NAME_LABEL, JOB_UID_LABEL
from stepkeeper_operator.settings import OperatorSettings

__all__ = [
    "KEPT_JOBSET",
    "TRAINER_STATUS_URL",
    "build_config_map",
    "config_map_name",
    "job_labels",
    "owner_reference",
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


def build_config_map(
    job: CheckpointedTrainingJob, settings: OperatorSettings, ca_pem: str, *, jobset: str | None = None
) -> dict[str, Any]:
    """Build the manifest. The mount in running pods follows an edit, but they use it only at their next start.

    `jobset` is the job's JobSet as `keep_jobset` builds it.
    """
    kept = {} if jobset is None else {KEPT_JOBSET: jobset}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": config_map_name(job.metadata.name),
            "namespace": job.metadata.namespace,
            "labels": job_labels(job),
            "ownerReferences": [owner_reference(job)],
        },
        "data": {
            SETTINGS_FILE_NAME: _settings(job, settings).to_json().decode(),
            CA_FILE_NAME: ca_pem,
            TRAINER_STATUS_URL: settings.trainer_status_url(job.metadata.namespace, job.metadata.name),
            **kept,
        },
    }


def _settings(job: CheckpointedTrainingJob, settings: OperatorSettings) -> Settings:
    checkpoint = job.spec.checkpoint
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
    )
