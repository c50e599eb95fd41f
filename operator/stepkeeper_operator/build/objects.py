"""Build the parts that all manifests have in common."""

from typing import Any

from stepkeeper_operator.api.v1alpha1.trainingjob import API_VERSION, KIND, CheckpointedTrainingJob
from stepkeeper_operator.labels import JOB_NAME_LABEL, JOB_UID_LABEL

__all__ = ["job_labels", "owner_reference"]


def owner_reference(job: CheckpointedTrainingJob) -> dict[str, Any]:
    """Refer to the job as the controller of an object, so that the object is deleted with the job."""
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
