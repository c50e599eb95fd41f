"""Build the JobSet that runs one job. After its creation only its `suspend` changes."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.facts.queued_resource import QueuedMachines
from stepkeeper_operator.labels import (
    JOBSET_NUMBER_LABEL,
    KUEUE_PREFIX,
    MACHINES_HASH_ANNOTATION,
    NODE_POOL_LABEL,
    SLICE_LABEL,
    TEMPLATE_HASH_ANNOTATION,
    WORKER_JOB,
)
from stepkeeper_operator.training_jobs.build.failure_policy import (
    build_job_policy,
    build_jobset_policy,
    limit_restarts,
)
from stepkeeper_operator.training_jobs.build.objects import job_labels, owner_reference
from stepkeeper_operator.training_jobs.build.pod import build_pod_template

__all__ = ["build_jobset", "keep_jobset", "machines_hash", "queue_labels", "restore_jobset", "template_hash"]

_PROVISIONING_ANNOTATIONS: Final = "provreq.kueue.x-k8s.io/"
"""Parameters of the ProvisioningRequest that Kueue creates for the JobSet."""

_NUMBER: Final = "<stepkeeper.dev/jobset-number>"
"""Stands for the JobSet's number in a kept manifest."""

_EXCLUSIVE_TOPOLOGY: Final = "alpha.jobset.sigs.k8s.io/exclusive-topology"
"""JobSet's annotation to run one Job per value of the named node label."""


def build_jobset(
    job: CheckpointedTrainingJob,
    *,
    number: int | str,
    failures_left: int,
    unreachable_s: int,
    machines: QueuedMachines | None = None,
) -> dict[str, Any]:
    """Build the manifest of the job's JobSet with that number.

    It restarts `failures_left` times after failures, and its pods stay on an unreachable node for `unreachable_s`.
    `machines` is the QueuedResource that the job names, if it names one.
    """
    labels = job_labels(job) | {JOBSET_NUMBER_LABEL: str(number)}
    workers = {
        "name": WORKER_JOB,
        "replicas": job.spec.placement.n_slices,
        "template": {
            "metadata": {"labels": labels},
            "spec": _build_job_spec(job, number=number, unreachable_s=unreachable_s, machines=machines),
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.metadata.name,
            "namespace": job.metadata.namespace,
            "labels": queue_labels(job) | labels,
            "annotations": _build_annotations(job, machines),
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {
            "suspend": False,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": build_jobset_policy(job, failures_left=failures_left),
            "replicatedJobs": [workers],
        },
    }


def keep_jobset(job: CheckpointedTrainingJob, *, unreachable_s: int, machines: QueuedMachines | None) -> str:
    """Build the JobSet's manifest as text that is kept, for `restore_jobset` of any version of the operator."""
    manifest = build_jobset(
        job, number=_NUMBER, failures_left=0, unreachable_s=unreachable_s, machines=machines
    )
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"))


def restore_jobset(kept: str, *, number: int, failures_left: int) -> dict[str, Any]:
    """Return the kept manifest, for a JobSet with that number that restarts `failures_left` times after failures."""
    manifest: dict[str, Any] = json.loads(kept.replace(_NUMBER, str(number)))
    manifest["spec"]["failurePolicy"]["maxRestarts"] = limit_restarts(failures_left)
    return manifest


def _build_annotations(job: CheckpointedTrainingJob, machines: QueuedMachines | None) -> dict[str, str]:
    """Build the annotations for Kueue and JobSet, and the hashes that show later whether the JobSet is outdated."""
    return {
        **_pick(job.metadata.annotations, _PROVISIONING_ANNOTATIONS),
        TEMPLATE_HASH_ANNOTATION: template_hash(job, machines),
        **({} if machines is None else {MACHINES_HASH_ANNOTATION: machines_hash(machines)}),
        **_spread(job, machines),
    }


def _build_job_spec(
    job: CheckpointedTrainingJob, *, number: int | str, unreachable_s: int, machines: QueuedMachines | None
) -> dict[str, Any]:
    """Build the spec of the Job of one slice: one pod per host, and no pod is replaced alone."""
    n_hosts = job.spec.placement.hosts_per_slice
    return {
        "parallelism": n_hosts,
        "completions": n_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": build_job_policy(job),
        "template": build_pod_template(job, number=number, unreachable_s=unreachable_s, machines=machines),
    }


def queue_labels(job: CheckpointedTrainingJob) -> dict[str, str]:
    """Return the job's labels for Kueue, which its JobSet gets."""
    return _pick(job.metadata.labels, KUEUE_PREFIX)


def template_hash(job: CheckpointedTrainingJob, machines: QueuedMachines | None = None) -> str:
    """Hash the user's template and placement, without the additions of the operator and the API server.

    So no upgrade of the operator or of the CRD restarts a job. The uid of the QueuedResource is part of the placement,
    so a recreated resource with the same name differs.
    """
    uid = [] if machines is None else [machines.uid]
    placement = job.spec.placement.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return _digest([job.spec.template, placement, *uid])


def machines_hash(machines: QueuedMachines) -> str:
    """Hash the parts of a QueuedResource from which pods are built. A change of them ends no running pods."""
    return _digest([machines.autocheckpoint, machines.spot, machines.slices.count])


def _pick(pairs: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {key: value for key, value in pairs.items() if key.startswith(prefix)}


def _digest(parts: list[Any]) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _spread(job: CheckpointedTrainingJob, machines: QueuedMachines | None) -> dict[str, str]:
    """Keep the pods of each slice of the job on one slice of the machines, if there are several.

    On GKE a slice is a node pool. An annotation of the job can name another node label; an empty one disables this.
    """
    if machines is not None:
        return {_EXCLUSIVE_TOPOLOGY: SLICE_LABEL} if machines.slices.count > 1 else {}
    several = job.spec.placement.tpu is not None and job.spec.placement.n_slices > 1
    label = job.metadata.annotations.get(_EXCLUSIVE_TOPOLOGY, NODE_POOL_LABEL if several else "")
    return {_EXCLUSIVE_TOPOLOGY: label} if label else {}
