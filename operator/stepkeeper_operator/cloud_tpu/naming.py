"""Make the names of a QueuedResource's objects in the cloud. The same input always gives the same names. Pure."""

import hashlib
import re
import uuid
from typing import Final

from stepkeeper_operator.api.base import ObjectMeta
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.cloud_tpu.cloud import Place
from stepkeeper_operator.labels import (
    QUEUED_RESOURCE_LABEL,
    QUEUED_RESOURCE_NAMESPACE_LABEL,
    QUEUED_RESOURCE_UID_LABEL,
)

__all__ = [
    "CLUSTER_LABEL",
    "FINALIZER",
    "NAMESPACE_LABEL",
    "NAME_LABEL",
    "NODE_LABELS_KEY",
    "STARTUP_SCRIPT_KEY",
    "UID_LABEL",
    "make_cloud_id",
    "make_labels",
    "make_node_ids",
    "make_node_labels",
    "make_request_id",
    "parse_cloud_name",
    "parse_number",
]

FINALIZER: Final = "stepkeeper.dev/cloud-tpu"
"""It keeps a QueuedResource until its cloud resource and machines are deleted."""

CLUSTER_LABEL: Final = "stepkeeper-cluster"
"""Label on cloud nodes: uid of the cluster's namespace kube-system."""

NAMESPACE_LABEL: Final = "stepkeeper-namespace"
NAME_LABEL: Final = "stepkeeper-name"
UID_LABEL: Final = "stepkeeper-uid"
"""Label on cloud nodes: uid of the QueuedResource."""

NODE_LABELS_KEY: Final = "stepkeeper-node-labels"
"""Key in the metadata of hosts: the labels that their kubelets set when they join, as key=value,key=value."""

STARTUP_SCRIPT_KEY: Final = "startup-script"

_NAMES: Final = uuid.UUID("5d3f8a52-8f0c-4a39-9a53-1c2f6e0b7d10")
"""Namespace of the request ids. Never change it: after an upgrade, the operator must make the same ids."""

_MAX_BASE: Final = 44
"""Longest id before its number: with the number and the index of a node it has at most 63 characters."""


def make_cloud_id(namespace: str, name: str, number: int) -> str:
    """Make the id of the `number`th cloud resource of an object.

    The first is `<namespace>-<name>`. Later ones end in their number: the cloud may reserve a used id for a while.
    """
    base = _make_base(namespace, name)
    return base if number == 0 else f"{base}-r{number}"


def parse_number(namespace: str, name: str, cloud_id: str) -> int | None:
    """Return the number that `make_cloud_id` makes this id from. Return None for another object's id."""
    base = _make_base(namespace, name)
    if cloud_id == base:
        return 0
    match = re.fullmatch(rf"{re.escape(base)}-r([1-9]\d*)", cloud_id)
    return None if match is None else int(match[1])


def parse_cloud_name(cloud_name: str) -> Place | None:
    """Return the place in a full name. Return None if the name is invalid."""
    match = re.fullmatch(r"projects/([^/]+)/locations/([^/]+)/queuedResources/[^/]+", cloud_name)
    return None if match is None else Place(project=match[1], zone=match[2])


def make_request_id(uid: str, number: int, verb: str, detail: str) -> str:
    """Make the id by which the API recognizes a repeated request. A different `detail` makes another id."""
    return str(uuid.uuid5(_NAMES, f"{uid}/{number}/{verb}/{detail}"))


def make_node_ids(resource: QueuedResource, cloud_id: str) -> tuple[tuple[str, ...], str | None]:
    """Make the ids of the cloud nodes, and their common prefix if there is more than one."""
    prefix, count = resource.spec.slices.name_prefix or cloud_id, resource.spec.slices.count
    if count == 1:
        return (prefix,), None
    return tuple(f"{prefix}-{index}" for index in range(count)), prefix


def make_labels(meta: ObjectMeta, cluster_id: str) -> dict[str, str]:
    """Make the labels that name the owner of a cloud node."""
    return {
        CLUSTER_LABEL: cluster_id,
        NAMESPACE_LABEL: meta.namespace,
        NAME_LABEL: meta.name,
        UID_LABEL: meta.uid,
    }


def make_node_labels(meta: ObjectMeta) -> dict[str, str]:
    """Make the labels that name the owner of a Kubernetes node."""
    return {
        QUEUED_RESOURCE_UID_LABEL: meta.uid,
        QUEUED_RESOURCE_LABEL: meta.name,
        QUEUED_RESOURCE_NAMESPACE_LABEL: meta.namespace,
    }


def _make_base(namespace: str, name: str) -> str:
    """Make a cloud id without its number. A long one is cut, and ends with a digest of the whole name."""
    base = f"{namespace}-{name}"
    if not base[0].isalpha():  # a namespace may begin with a digit, a cloud id may not
        base = f"n{base}"
    if len(base) <= _MAX_BASE:
        return base
    suffix = f"-{hashlib.sha256(f'{namespace}/{name}'.encode()).hexdigest()[:8]}"
    return base[: _MAX_BASE - len(suffix)].rstrip("-") + suffix
