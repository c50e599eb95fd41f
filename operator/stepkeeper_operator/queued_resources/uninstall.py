"""Refuse to uninstall the operator while it alone knows of machines in the cloud: `check-uninstall`."""

import os
from collections.abc import Sequence
from typing import Final, TextIO

from stepkeeper_operator.cluster import QUEUED_RESOURCES, Cluster
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["OBSTACLE", "check_uninstall"]

_MAX_LISTED: Final = 20
_NOT_FOUND: Final = 404

OBSTACLE: Final = 1
"""Exit status of a refusal. The chart's Job doesn't try again after it."""


async def check_uninstall(cluster: Cluster, output: TextIO) -> int:
    """Look for QueuedResources whose machines an uninstallation would leave running, and write them to `output`.

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
    left = [raw for raw in objects if raw["spec"].get("deletionPolicy", "Delete") == "Delete"]
    if not left:
        return os.EX_OK
    output.write(f"{_describe(left)}\n")
    return OBSTACLE


def _describe(left: Sequence[RawObject]) -> str:
    have = "QueuedResources have" if len(left) > 1 else "QueuedResource has"
    first = left[0]["metadata"]
    lines = [
        f"{len(left)} {have} machines in the cloud that nobody would delete any more, and that go on to cost:"
    ]
    lines += [_line(raw) for raw in left[:_MAX_LISTED]]
    if len(left) > _MAX_LISTED:
        lines.append(f"  and {len(left) - _MAX_LISTED} more: kubectl get qr --all-namespaces")
    delete = f"kubectl delete qr --namespace {first['namespace']} {first['name']}"
    lines.append(f"Delete them, wait until they are gone, and uninstall again. The first one: {delete}")
    lines.append("To keep the machines, set spec.deletionPolicy: Retain.")
    lines.append("To uninstall regardless: helm uninstall --no-hooks")
    return "\n".join(lines)


def _line(raw: RawObject) -> str:
    meta, status = raw["metadata"], raw.get("status") or {}
    cloud = status.get("cloudName") or "nothing in the cloud is known yet"
    state = "being deleted" if "deletionTimestamp" in meta else status.get("state") or "new"
    return f"  {meta['namespace']}/{meta['name']}: {cloud} ({state})"
