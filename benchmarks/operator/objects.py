"""The objects of a job, as its user, the JobSet controller, the Job controller and kubelets make them.

All but the job itself are as the API server stores them.
"""

import time
import uuid
from typing import Any, Final

from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.labels import (
    COMPLETION_INDEX_LABEL,
    JOB_INDEX_LABEL,
    RESTART_ATTEMPT_LABEL,
    WORKER_JOB,
)

Raw = dict[str, Any]

NAMESPACE: Final = "load"
N_HOSTS: Final = 16
"""Pods of a job: one slice v5p of topology 4x4x4."""

_N_IMAGES: Final = 24
"""Images on a node: kubelets list up to 50."""


def training_job(name: str) -> Raw:
    trainer = {
        "name": "trainer",
        "image": "example.com/team/trainer:2026-11",
        "command": ["python", "train.py"],
    }
    return {
        "apiVersion": "stepkeeper.dev/v1alpha1",
        "kind": "CheckpointedTrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "totalSteps": 1_000_000,
            "placement": {"tpu": {"accelerator": "v5p", "topology": "4x4x4"}},
            "template": {"spec": {"containers": [trainer]}},
            "checkpoint": {"uri": f"gs://bucket/runs/{name}", "interval": {"every": {"seconds": 60}}},
        },
    }


def batch_job(jobset: Raw) -> Raw:
    """Make the Job of the JobSet's one slice."""
    meta, template = jobset["metadata"], jobset["spec"]["replicatedJobs"][0]["template"]
    name = f"{meta['name']}-{WORKER_JOB}-0"
    own = {
        "jobset.sigs.k8s.io/jobset-name": meta["name"],
        "jobset.sigs.k8s.io/jobset-uid": meta["uid"],
        "jobset.sigs.k8s.io/replicatedjob-name": WORKER_JOB,
        "jobset.sigs.k8s.io/replicatedjob-replicas": "1",
        RESTART_ATTEMPT_LABEL: "0",
        JOB_INDEX_LABEL: "0",
    }
    spec = template["spec"]
    pod = spec["template"]
    labels = {**pod["metadata"]["labels"], **own}
    pod_spec = {**pod["spec"], "subdomain": meta["name"]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **_stored(name),
            "namespace": NAMESPACE,
            "labels": {**template["metadata"]["labels"], **own},
            "annotations": own,
            "ownerReferences": [_owner(jobset)],
        },
        "spec": {**spec, "template": {"metadata": {"labels": labels, "annotations": own}, "spec": pod_spec}},
        "status": {"active": N_HOSTS, "ready": N_HOSTS},
    }


def pod(job: Raw, index: int) -> Raw:
    """Make a running pod of the Job."""
    template, name = job["spec"]["template"], job["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **_stored(f"{name}-{index}-{index + 10:05x}"),
            "namespace": NAMESPACE,
            "labels": {**template["metadata"]["labels"], COMPLETION_INDEX_LABEL: str(index)},
            "annotations": {**template["metadata"]["annotations"], COMPLETION_INDEX_LABEL: str(index)},
            "ownerReferences": [_owner(job)],
            "finalizers": ["batch.kubernetes.io/job-tracking"],
        },
        "spec": {
            **template["spec"],
            "nodeName": node_name(job, index),
            "hostname": f"{name}-{index}",
            "serviceAccountName": "default",
        },
        "status": _running_status(template["spec"]["containers"][0]["image"]),
    }


def _running_status(image: str) -> Raw:
    now = render_time(time.time())
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    container = {
        "name": "trainer",
        "image": image,
        "imageID": f"{image}@sha256:{'5' * 64}",
        "containerID": f"containerd://{'c' * 64}",
        "ready": True,
        "started": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": now}},
    }
    return {
        "phase": "Running",
        "startTime": now,
        "hostIP": "10.0.0.1",
        "podIP": "10.1.0.1",
        "podIPs": [{"ip": "10.1.0.1"}],
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds],
        "containerStatuses": [container],
    }


def node_name(job: Raw, index: int) -> str:
    return f"gke-pool-{job['metadata']['name']}-{index}"


def node(name: str) -> Raw:
    """Make the node of one host as its kubelet reports it now."""
    images = [
        {"names": [f"registry.example.com/team/image-{i}@sha256:{i:064x}"], "sizeBytes": 10**8 + i}
        for i in range(_N_IMAGES)
    ]
    amounts = {
        "cpu": "208",
        "memory": "464Gi",
        "ephemeral-storage": "98Gi",
        "pods": "110",
        "google.com/tpu": "4",
    }
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/os": "linux",
        "topology.kubernetes.io/zone": "us-east5-a",
        "node.kubernetes.io/instance-type": "ct5p-hightpu-4t",
        "cloud.google.com/gke-nodepool": name.rpartition("-")[0],
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {**_stored(name), "labels": labels},
        "spec": {"providerID": f"gce://project/us-east5-a/{name}"},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": _node_conditions(),
            "addresses": [
                {"type": "InternalIP", "address": "10.0.0.1"},
                {"type": "Hostname", "address": name},
            ],
            "images": images,
        },
    }


def _node_conditions() -> list[Raw]:
    now = render_time(time.time())
    kinds = {"MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False", "Ready": "True"}
    began = render_time(0)
    return [
        {
            "type": kind,
            "status": status,
            "reason": f"Kubelet{kind}",
            "message": "as it should be",
            "lastHeartbeatTime": now,
            "lastTransitionTime": began,
        }
        for kind, status in kinds.items()
    ]


def _stored(name: str) -> Raw:
    """Make the metadata that the API server adds."""
    uid = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
    return {"name": name, "uid": uid, "creationTimestamp": render_time(time.time()), "generation": 1}


def _owner(raw: Raw) -> Raw:
    return {
        "apiVersion": raw["apiVersion"],
        "kind": raw["kind"],
        "name": raw["metadata"]["name"],
        "uid": raw["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
