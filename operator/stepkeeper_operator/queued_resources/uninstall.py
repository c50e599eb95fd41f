"""Refuse to uninstall the operator while QueuedResources need it: `check-uninstall`."""

import os
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final, TextIO

from stepkeeper_operator.api.v1alpha1.queuedresource import DeletionPolicy
from stepkeeper_operator.cloud_tpu.naming import FINALIZER
from stepkeeper_operator.cluster.protocol import Cluster
from stepkeeper_operator.cluster.resources import QUEUED_RESOURCES
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.labels import ADOPT_ANNOTATION

__all__ = ["OBSTACLE", "check_uninstall"]

_MAX_LISTED: Final = 20

OBSTACLE: Final = 1
"""Exit status of a refusal. The chart's Job doesn't retry after it."""


async def check_uninstall(cluster: Cluster, output: TextIO) -> int:
    """Write the QueuedResources that need the operator to `output`. Return the exit status: 0, `OBSTACLE` or 75.

    Without it, the machines of those with deletionPolicy Delete stay. Objects with the operator's finalizer can't be
    deleted, nor can their namespaces. 75 means that the API server didn't answer.
    """
    try:
        objects = await cluster.list_all(QUEUED_RESOURCES)
    except ApiError as error:
        if error.status == HTTPStatus.NOT_FOUND:  # without the CRD there are no objects
            return os.EX_OK
        output.write(f"cannot list QueuedResources: {error}\n")
        return os.EX_TEMPFAIL
    blocking = [raw for raw in objects if _needs_operator(raw)]
    if not blocking:
        return os.EX_OK
    output.write(f"{_describe(blocking)}\n")
    return OBSTACLE


def _needs_operator(raw: RawObject) -> bool:
    return _policy_of(raw) == DeletionPolicy.DELETE or FINALIZER in raw["metadata"].get("finalizers", ())


def _policy_of(raw: RawObject) -> str:
    return str(raw["spec"].get("deletionPolicy", DeletionPolicy.DELETE))


def _describe(blocking: Sequence[RawObject]) -> str:
    first, more = blocking[0]["metadata"], len(blocking) - _MAX_LISTED
    needs = "1 QueuedResource needs" if len(blocking) == 1 else f"{len(blocking)} QueuedResources need"
    lines = [
        f"{needs} the operator. Without it, machines cost money, and deletions of objects and namespaces never finish:",
        *(_line(raw) for raw in blocking[:_MAX_LISTED]),
        *([f"  and {more} more: kubectl get qr --all-namespaces"] if more > 0 else []),
        "Delete all of them, wait until they are gone, and uninstall again. To delete the first one:",
        f"  kubectl delete qr --namespace {first['namespace']} {first['name']}",
        "To keep its machines, set spec.deletionPolicy: Retain first. A new object with the same namespace and name",
        f"can take them over with annotation {ADOPT_ANNOTATION}.",
        "To uninstall regardless: helm uninstall --no-hooks",
    ]
    return "\n".join(lines)


def _line(raw: RawObject) -> str:
    meta, status = raw["metadata"], raw.get("status") or {}
    cloud = status.get("cloudName") or "no known cloud resource"
    state = "being deleted" if "deletionTimestamp" in meta else status.get("state") or "new"
    return f"  {meta['namespace']}/{meta['name']}: {cloud} ({state}, deletionPolicy {_policy_of(raw)})"
