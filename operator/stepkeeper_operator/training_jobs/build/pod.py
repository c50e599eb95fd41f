"""Build the pod template: the user's, plus the identity, settings and token that the runtime reads.

A container's `null` list or map counts as an empty one, as for the API server.
"""

import copy
from collections.abc import Collection
from typing import Any, Final

from stepkeeper.contract import (
    CA_FILE_NAME,
    CONTAINER_NAME,
    COORDINATOR_PORT,
    NOTICE_FILE,
    RUN_FOLDER,
    SETTINGS_FOLDER,
    TERMINATION_FILE,
    TOKEN_FILE,
    Identity,
    token_audience,
)
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.facts.queued_resource import QueuedMachines
from stepkeeper_operator.labels import (
    COMPLETION_INDEX_LABEL,
    JOB_INDEX_LABEL,
    JOBSET_NUMBER_LABEL,
    RESTART_ATTEMPT_LABEL,
    TPU_RESOURCE,
    WORKER_JOB,
)
from stepkeeper_operator.training_jobs.build.objects import (
    TRAINER_STATUS_URL,
    config_map_name,
    job_labels,
)
from stepkeeper_operator.training_jobs.build.placement import (
    choose_grace_s,
    limit_grace_s,
    node_selector,
    tolerations,
)

__all__ = ["build_pod_template"]

_SETTINGS_VOLUME: Final = "stepkeeper-settings"
_TOKEN_VOLUME: Final = "stepkeeper-token"  # noqa: S105  # a volume's name
_RUN_VOLUME: Final = "stepkeeper-run"
_TOKEN_LIFE_S: Final = 3600

_FIELD_PATHS: Final = {
    "pod": "metadata.name",
    "pod_uid": "metadata.uid",
    "node": "spec.nodeName",
    "restart_attempt": f"metadata.labels['{RESTART_ATTEMPT_LABEL}']",
    "slice_index": f"metadata.labels['{JOB_INDEX_LABEL}']",
    "host_index": f"metadata.labels['{COMPLETION_INDEX_LABEL}']",
}
"""Fields of Identity that differ by pod, filled by the downward API."""


def build_pod_template(
    job: CheckpointedTrainingJob, *, number: int | str, unreachable_s: int, machines: QueuedMachines | None
) -> dict[str, Any]:
    """Build the pod template of the JobSet with that number. `machines` is the job's QueuedResource."""
    template, placement = copy.deepcopy(job.spec.template), job.spec.placement
    meta, spec = template.setdefault("metadata", {}), template["spec"]
    meta["labels"] = (meta.get("labels") or {}) | job_labels(job) | {JOBSET_NUMBER_LABEL: str(number)}
    spec["restartPolicy"] = "Never"  # JobSet restarts all pods together
    grace_s = spec["terminationGracePeriodSeconds"] = choose_grace_s(job, machines)
    if selector := node_selector(placement, machines):
        spec["nodeSelector"] = (spec.get("nodeSelector") or {}) | selector
    spec["tolerations"] = tolerations(
        placement, spec.get("tolerations") or [], unreachable_s=unreachable_s, grace_s=grace_s
    )
    spec["volumes"] = [*(spec.get("volumes") or []), *_volumes(job)]
    trainer_grace_s = limit_grace_s(grace_s, job, machines)
    for index, container in enumerate(spec["containers"]):
        if container["name"] == CONTAINER_NAME:
            spec["containers"][index] = _trainer(job, container, number=number, grace_s=trainer_grace_s)
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        # The termination message of a program that writes none is the end of its log.
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    return template


def _trainer(
    job: CheckpointedTrainingJob, container: dict[str, Any], *, number: int | str, grace_s: int
) -> dict[str, Any]:
    trainer = copy.deepcopy(container)
    termination_file = trainer.get("terminationMessagePath") or TERMINATION_FILE
    # The user's variables come last: they can refer only to those before them.
    own = trainer.get("env") or []
    trainer["env"] = [
        *_identity(job, number=number, grace_s=grace_s, termination_file=termination_file),
        *_kubeflow(job, {each["name"] for each in own}),
        *own,
    ]
    trainer["volumeMounts"] = [
        *(trainer.get("volumeMounts") or []),
        {"name": _SETTINGS_VOLUME, "mountPath": SETTINGS_FOLDER, "readOnly": True},
        {"name": _TOKEN_VOLUME, "mountPath": TOKEN_FILE.rpartition("/")[0], "readOnly": True},
        {"name": _RUN_VOLUME, "mountPath": RUN_FOLDER},
    ]
    # A shell as PID 1 does not forward SIGTERM to its trainer; the file always works.
    notice = {"preStop": {"exec": {"command": ["touch", NOTICE_FILE]}}}
    trainer["lifecycle"] = notice | (trainer.get("lifecycle") or {})
    if chips := job.spec.placement.chips_per_host:
        resources, tpu = trainer.get("resources") or {}, {TPU_RESOURCE: str(chips)}
        both = {kind: (resources.get(kind) or {}) | tpu for kind in ("limits", "requests")}
        trainer["resources"] = resources | both
    return trainer


def _identity(
    job: CheckpointedTrainingJob, *, number: int | str, grace_s: int, termination_file: str
) -> list[dict[str, Any]]:
    placement, name = job.spec.placement, job.metadata.name
    same = {
        "namespace": job.metadata.namespace,
        "job": name,
        "job_uid": job.metadata.uid,
        "jobset_number": str(number),
        "n_slices": str(placement.n_slices),
        "hosts_per_slice": str(placement.hosts_per_slice),
        "coordinator": f"{name}-{WORKER_JOB}-0-0.{name}",  # DNS name of the first pod of the JobSet
        "coordinator_port": str(COORDINATOR_PORT),
        "grace_s": str(grace_s),
        "termination_file": termination_file,
    }
    fixed = [{"name": Identity.variable(field), "value": value} for field, value in same.items()]
    by_pod = [
        {"name": Identity.variable(field), "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for field, path in _FIELD_PATHS.items()
    ]
    return [*fixed, *by_pod]


def _kubeflow(job: CheckpointedTrainingJob, own: Collection[str]) -> list[dict[str, Any]]:
    """List the variables by which trainers send their progress, as in a TrainJob of Kubeflow, but those in `own`."""
    url = {"name": config_map_name(job.metadata.name), "key": TRAINER_STATUS_URL, "optional": True}
    variables: list[dict[str, Any]] = [
        {"name": "KUBEFLOW_TRAINER_SERVER_URL", "valueFrom": {"configMapKeyRef": url}},
        {"name": "KUBEFLOW_TRAINER_SERVER_CA_CERT", "value": f"{SETTINGS_FOLDER}/{CA_FILE_NAME}"},
        {"name": "KUBEFLOW_TRAINER_SERVER_TOKEN", "value": TOKEN_FILE},
    ]
    return [each for each in variables if each["name"] not in own]


def _volumes(job: CheckpointedTrainingJob) -> list[dict[str, Any]]:
    token = {
        "audience": token_audience(job.metadata.uid),
        "expirationSeconds": _TOKEN_LIFE_S,
        "path": TOKEN_FILE.rpartition("/")[2],
    }
    return [
        {"name": _SETTINGS_VOLUME, "configMap": {"name": config_map_name(job.metadata.name)}},
        {"name": _TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}},
        {"name": _RUN_VOLUME, "emptyDir": {}},
    ]
