"""Read where a job keeps its checkpoints, so that two jobs with one root are told."""

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from stepkeeper.contract import CONTAINER_NAME
from stepkeeper_operator.api.v1alpha1.conditions import END_CONDITIONS
from stepkeeper_operator.facts.raw import RawObject, condition_of, parse_time, read_in

__all__ = ["CheckpointRoot", "JobRoot", "read_job_root"]

CheckpointRoot = tuple[str, ...]
"""The place of a root, from the outside in: what holds it, then its folders. A root inside another begins with that."""

_SUSPENDED: Final = "Suspended"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRoot:
    """A job as the user of a root."""

    namespace: str
    name: str
    uid: str
    created_at: float
    uri: str
    place: CheckpointRoot
    begun: bool
    """True if it has had an attempt."""

    at_rest: bool
    """True if it is over or suspended."""


def read_job_root(raw: RawObject) -> JobRoot | None:
    """Read the root of a job, also of one that can't be read otherwise. None: no other job can see its root."""
    meta, spec = raw["metadata"], raw.get("spec")
    uri = read_in(spec, "checkpoint", "uri")
    place = _find_place(uri, spec, meta["namespace"]) if isinstance(uri, str) else None
    if place is None:
        return None
    status = raw.get("status") or {}
    over = any(condition_of(raw, kind).get("status") == "True" for kind in END_CONDITIONS)
    asleep = read_in(spec, "suspend") is True and status.get("phase") == _SUSPENDED
    return JobRoot(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
        uri=str(uri),
        place=place,
        begun=bool(status.get("attempts")),
        at_rest=over or asleep,
    )


def _find_place(uri: str, spec: object, namespace: str) -> CheckpointRoot | None:
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    if parts.scheme == "gs" and parts.netloc:
        return ("gs", parts.netloc, *_split(parts.path))
    if parts.scheme != "file":
        return None
    pod = read_in(spec, "template", "spec")
    return _find_on_volume(parts.path, pod, namespace) if isinstance(pod, Mapping) else None


def _find_on_volume(path: str, pod: Mapping[str, Any], namespace: str) -> CheckpointRoot | None:
    """Find the folder on the volume that the trainer mounts there. None: no other pod sees it."""
    trainers = [c for c in _list_in(pod, "containers") if c.get("name") == CONTAINER_NAME]
    mounts = [m for trainer in trainers for m in _list_in(trainer, "volumeMounts")]
    folders = _split(path)
    holding = [m for m in mounts if folders[: len(_split(m.get("mountPath")))] == _split(m.get("mountPath"))]
    if not holding:
        return None
    mount = max(holding, key=lambda m: len(_split(m.get("mountPath"))))
    volumes = [v for v in _list_in(pod, "volumes") if v.get("name") == mount.get("name")]
    source = _find_source(volumes[0], namespace) if volumes else None
    if source is None or mount.get("subPathExpr"):
        return None
    return (*source, *_split(mount.get("subPath")), *folders[len(_split(mount.get("mountPath"))) :])


def _find_source(volume: Mapping[str, Any], namespace: str) -> CheckpointRoot | None:
    claim, path = read_in(volume, "persistentVolumeClaim", "claimName"), read_in(volume, "hostPath", "path")
    if isinstance(claim, str):
        return ("claim", namespace, claim)
    if isinstance(path, str):
        return ("host", *_split(path))
    server, export = read_in(volume, "nfs", "server"), read_in(volume, "nfs", "path")
    return ("nfs", server, *_split(export)) if isinstance(server, str) else None


def _split(path: object) -> CheckpointRoot:
    text = posixpath.normpath(path) if isinstance(path, str) and path else ""
    return tuple(part for part in text.split("/") if part not in {"", "."})


def _list_in(found: Mapping[str, Any], key: str) -> Iterable[Mapping[str, Any]]:
    items = found.get(key)
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else ()
