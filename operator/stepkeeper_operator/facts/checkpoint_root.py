"""Read where a job keeps its checkpoints, so that two jobs with one root are detected."""

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from stepkeeper.contract import CONTAINER_NAME
from stepkeeper_operator.facts.raw import RawObject, get_nested
from stepkeeper_operator.facts.rival import Rival, read_standing

__all__ = ["CheckpointRoot", "JobRoot", "is_inside", "read_job_root"]

CheckpointRoot = tuple[str, ...]
"""The place of a root: its bucket or volume, then its folders. A root inside another one begins with that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRoot(Rival):
    """A job as the user of a root."""

    uri: str
    place: CheckpointRoot


def is_inside(uri: str, root: str) -> bool:
    """Return True if `uri` is the folder or the bucket prefix `root`, or inside it."""
    try:
        parts, around = urlsplit(uri), urlsplit(root)
    except ValueError:
        return False
    same_store = parts.scheme == around.scheme and (parts.netloc == around.netloc or parts.scheme == "file")
    folders = _split(unquote(around.path))
    return same_store and _split(unquote(parts.path))[: len(folders)] == folders


def read_job_root(raw: RawObject) -> JobRoot | None:
    """Read the root of a job, even if other parts of it are unreadable. None: it has none that another job can see."""
    spec = raw.get("spec")
    uri = get_nested(spec, "checkpoint", "uri")
    place = _find_place(uri, spec, raw["metadata"]["namespace"]) if isinstance(uri, str) else None
    return None if place is None else JobRoot(uri=str(uri), place=place, **read_standing(raw))


def _find_place(uri: str, spec: object, namespace: str) -> CheckpointRoot | None:
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    if parts.scheme == "gs" and parts.netloc:
        return ("gs", parts.netloc, *_split(parts.path))
    if parts.scheme != "file":
        return None
    pod = get_nested(spec, "template", "spec")
    return _find_on_volume(parts.path, pod, namespace) if isinstance(pod, Mapping) else None


def _find_on_volume(path: str, pod: Mapping[str, Any], namespace: str) -> CheckpointRoot | None:
    """Find the volume that the trainer mounts at the path, and the folder on it. None: no other pod sees it."""
    trainers = [c for c in _list_in(pod, "containers") if c.get("name") == CONTAINER_NAME]
    mounts = [(_split(m.get("mountPath")), m) for t in trainers for m in _list_in(t, "volumeMounts")]
    folders = _split(path)
    around = [(at, mount) for at, mount in mounts if folders[: len(at)] == at]
    if not around:
        return None
    at, mount = max(around, key=lambda each: len(each[0]))  # the innermost mount hides the others
    volumes = [v for v in _list_in(pod, "volumes") if v.get("name") == mount.get("name")]
    source = _find_source(volumes[0], namespace) if volumes else None
    if source is None or mount.get("subPathExpr"):  # such an expression depends on the pod's environment
        return None
    return (*source, *_split(mount.get("subPath")), *folders[len(at) :])


def _find_source(volume: Mapping[str, Any], namespace: str) -> CheckpointRoot | None:
    """Find a volume that several pods can mount. None: each pod has its own, or the kind of volume is unknown."""
    claim = get_nested(volume, "persistentVolumeClaim", "claimName")
    if isinstance(claim, str):
        return ("claim", namespace, claim)
    path = get_nested(volume, "hostPath", "path")
    if isinstance(path, str):
        return ("host", *_split(path))
    server, export = get_nested(volume, "nfs", "server"), get_nested(volume, "nfs", "path")
    return ("nfs", server, *_split(export)) if isinstance(server, str) else None


def _split(path: object) -> CheckpointRoot:
    text = posixpath.normpath(path) if isinstance(path, str) and path else ""
    return tuple(part for part in text.split("/") if part not in {"", "."})


def _list_in(found: Mapping[str, Any], key: str) -> Iterable[Mapping[str, Any]]:
    items = found.get(key)
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else ()
