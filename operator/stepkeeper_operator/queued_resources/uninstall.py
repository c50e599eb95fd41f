"""Refuse to uninstall the operator while it alone can let go of QueuedResources: `check-uninstall`."""

import os
from collections.abc import Sequence
from typing import Final, TextIO

from stepkeeper_operator.api.v1alpha1.queuedresource import DeletionPolicy
from stepkeeper_operator.cluster import QUEUED_RESOURCES, Cluster
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.labels import ADOPT_ANNOTATION
from stepkeeper_operator.queued_resources.naming import FINALIZER

__all__ = ["OBSTACLE", "check_uninstall"]

_MAX_LISTED: Final = 20
_NOT_FOUND: Final = 404

OBSTACLE: Final = 1
"""Exit status of a refusal. The chart's Job doesn't try again after it."""


async def check_uninstall(cluster: Cluster, output: TextIO) -> int:
    """Look for QueuedResources that need the operator, and write them to `output`.

    Without it, nobody deletes the machines of those with deletionPolicy Delete; and none that has the operator's
    finalizer can be deleted, nor can its namespace.

    Returns:
        The exit status: 0 if there are none, `OBSTACLE`, or 75 if the API server can't tell now.
    """
    try:
        objects = await cluster.list_all(QUEUED_RESOURCES)
    except ApiError as error:
        if error.status == _NOT_FOUND:  # the CRD is gone, and with it every object
            return os.EX_OK
        output.write(f"cannot see whether there are QueuedResources: {error}\n")
        return os.EX_TEMPFAIL
    needy = [raw for raw in objects if _deletes(raw) or FINALIZER in raw["metadata"].get("finalizers", ())]
    if not needy:
        return os.EX_OK
    output.write(f"{_describe(needy)}\n")
    return OBSTACLE


def _deletes(raw: RawObject) -> bool:
    return bool(raw["spec"].get("deletionPolicy", DeletionPolicy.DELETE) == DeletionPolicy.DELETE)


def _describe(needy: Sequence[RawObject]) -> str:
    whys = {
        True: "machines in the cloud that nobody would delete any more, and that go on to cost",
        False: "a finalizer that nobody would take away any more: neither the object nor its namespace could go",
    }
    lines = []
    for deletes, why in whys.items():
        these = [raw for raw in needy if _deletes(raw) is deletes]
        have = "QueuedResources have" if len(these) > 1 else "QueuedResource has"
        lines += [f"{len(these)} {have} {why}:", *_list(these)] if these else []
    first = needy[0]["metadata"]
    delete = f"kubectl delete qr --namespace {first['namespace']} {first['name']}"
    lines.append(f"Delete them, wait until they are gone, and uninstall again. The first one: {delete}")
    lines.append(
        "Machines stay where spec.deletionPolicy is Retain, and a new object of the same namespace and name takes "
        f"them up by annotation {ADOPT_ANNOTATION}. Set it before the deletion to keep them."
    )
    lines.append("To uninstall regardless: helm uninstall --no-hooks")
    return "\n".join(lines)


def _list(objects: Sequence[RawObject]) -> list[str]:
    lines = [_line(raw) for raw in objects[:_MAX_LISTED]]
    if len(objects) > _MAX_LISTED:
        lines.append(f"  and {len(objects) - _MAX_LISTED} more: kubectl get qr --all-namespaces")
    return lines


def _line(raw: RawObject) -> str:
    meta, status = raw["metadata"], raw.get("status") or {}
    cloud = status.get("cloudName") or "nothing in the cloud is known yet"
    state = "being deleted" if "deletionTimestamp" in meta else status.get("state") or "new"
    return f"  {meta['namespace']}/{meta['name']}: {cloud} ({state})"
